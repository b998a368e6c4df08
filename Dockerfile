# megappo on a node with GPUs: docker build -t megappo . && docker run --gpus all --ipc=host --ulimit memlock=-1 -it megappo
# Every RUN line is executed by tests/test_package.py, as far as a machine without Docker can. TransformerEngine's fused layers are
# optional and compile for 17 minutes on 2 cores: --build-arg SETUP=--transformer-engine
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
ARG SETUP=""
ENV CUDA_HOME=/usr/local/cuda MEGAPPO_CUDA_VENV=/opt/megappo-env MEGAPPO_VENV=/opt/megappo-env PATH=/opt/megappo-env/bin:$PATH
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3 python3-venv python3-dev gcc g++ git
COPY . /opt/megappo
WORKDIR /opt/megappo
RUN scripts/setup_cuda_env.sh $SETUP
RUN megappo --help
