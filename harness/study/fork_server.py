"""The first module that the fork server imports, before torch, which takes seconds; nothing else imports it."""

from leakgauge.harness.study.orphans import end_fork_server_with_parent

end_fork_server_with_parent()
