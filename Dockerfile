# The two commands of the README in a container. The image holds the packages; the chain runs when a container starts.
#   docker build -t sftkit .
#   docker run --rm -v "$PWD/runs:/sftkit/runs" sftkit                  make sft, on the CPU
#   docker run --rm --gpus all -v "$PWD/runs:/sftkit/runs" sftkit       on all GPUs; needs the NVIDIA container toolkit
#   docker run --rm -it -v "$PWD/runs:/sftkit/runs" sftkit make chat
# Without CUDA the image is some gigabytes smaller: --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
# Several GPUs or data workers want shared memory: docker run --ipc=host
FROM python:3.12-slim

# torch.compile calls a compiler; the README's commands call git and make.
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /sftkit
ARG PIP_EXTRA_INDEX_URL
# First what decides the packages, so that a change of a recipe or script does not install them again.
COPY pyproject.toml constraints.txt Makefile README.md LICENSE ./
COPY src/sftkit/__init__.py src/sftkit/__init__.py
RUN make install PYTHON=python3

COPY src src
COPY labs labs
COPY scripts scripts
COPY recipes recipes
COPY accelerate_configs accelerate_configs
COPY benchmarks/smoke_plan.yaml benchmarks/smoke_plan.yaml
CMD ["make", "sft"]
