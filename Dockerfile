# docker build --tag leakgauge .
# docker run --rm --user "$(id -u):$(id -g)" --volume "$PWD:/repository" leakgauge gate study.toml ...
FROM python:3.11-slim AS wheel
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel /source

FROM python:3.11-slim
# git: the gate reads the target branch's baseline
RUN apt-get update && apt-get install --yes --no-install-recommends git && rm -rf /var/lib/apt/lists/* \
  && git config --system --add safe.directory '*'
# an index of torch's builds for the CPU, which are smaller
ARG TORCH_INDEX=
COPY constraints.txt /constraints.txt
COPY --from=wheel /wheel /wheel
RUN pip install --no-cache-dir --constraint /constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} /wheel/*.whl
ENV OMP_NUM_THREADS=1 HOME=/tmp
WORKDIR /repository
ENTRYPOINT ["leakgauge"]
