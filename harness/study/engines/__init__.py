"""One file an engine: a new one is found by its name (`study.engine.engine_class`)."""
