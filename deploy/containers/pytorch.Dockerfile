# Stasis in an image of PyTorch, so that its programs have their GPU memory moved by the direct path.
#
#   docker build -f deploy/containers/pytorch.Dockerfile -t pytorch-stasis .     # at the top of the source
#   docker run --rm --gpus all pytorch-stasis python3 train.py
#   docker build -f deploy/containers/pytorch.Dockerfile --build-arg CRIU=yes -t pytorch-stasis-criu .
#
# The packages are made in the same image that they are installed in, so that its C library will do: PyTorch's images
# are of Ubuntu 22.04, whose is older than that of Debian 12. BASE is any image of Debian or Ubuntu with apt.
#
# CRIU=yes: with a CRIU, for jobs that are saved inside of the container (`stasis run --images-dir`, as in a pod of
# Kubernetes). Without, a dump is made by a tool outside of the container.
ARG BASE=pytorch/pytorch

FROM ${BASE} AS build
COPY . /src
WORKDIR /src
RUN tools/setup --for package && tools/package --only deb --out /packages

FROM ${BASE}
ARG CRIU=no
COPY --from=build /packages/stasis_*.deb /packages/
RUN apt-get update && \
    apt-get install -y --no-install-recommends /packages/stasis_*.deb && \
    if [ "$CRIU" = yes ]; then stasis-get-criu --force-private --untried --suite forky; fi && \
    rm -rf /packages /var/lib/apt/lists/*
ENTRYPOINT ["stasis", "run", "--"]
CMD ["python3"]
