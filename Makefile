# make setup | demo | test | ray-test | kube-test | k8s | chaos | lint | bench | bench-decode | bench-transfer | bench-prefill | soak-prefill | docs | proto | proto-baseline | clean  (README.md shows what each one does)
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
export PATH := $(CURDIR)/$(BIN):$(PATH)

PROTOS := $(wildcard proto/sluice/v1/*.proto)
NATIVE := $(shell find transfer/hostcann transfer/csrc engine/ops/csrc -name '*.c' -o -name '*.cpp' -o -name '*.h' -o -name '*.txt' 2>/dev/null) CMakeLists.txt

.PHONY: setup proto proto-baseline k8s native demo test ray-test kube-test chaos lint docs bench bench-decode bench-transfer bench-prefill soak-prefill clean
setup: $(VENV)/.installed build/.native build/torch_npu/.installed build/kubernetes-validate-1.20/.installed

$(VENV)/.tools: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt grpcio-tools mypy-protobuf cmake ninja "setuptools>=77"
	touch $@

proto/gen/.built: $(PROTOS) $(VENV)/.tools
	rm -rf proto/gen && mkdir -p proto/gen
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=proto/gen --grpc_python_out=proto/gen --mypy_out=quiet:proto/gen --mypy_grpc_out=quiet:proto/gen $(PROTOS)
	touch proto/gen/sluice/__init__.py proto/gen/sluice/v1/__init__.py $@
proto: proto/gen/.built

$(VENV)/.installed: pyproject.toml constraints.txt proto/gen/.built
	$(PIP) install -c constraints.txt -e '.[dev,build]'
	touch $@

# torch_npu lies apart from the environment: where it is found, torch loads it at its own import and transformers imports
# it, and both fail without a driver. Tests that read its operators' schemas put it on their child's PYTHONPATH.
build/torch_npu/.installed: constraints.txt $(VENV)/.tools
	$(PIP) install -c constraints.txt --no-deps --upgrade --target $(@D) torch_npu
	touch $@

# The last release that knows Kubernetes 1.20, the oldest server; the environment has one that knows the newest.
build/kubernetes-validate-1.20/.installed: $(VENV)/.tools
	$(PIP) install --no-deps --upgrade --target $(@D) kubernetes-validate==1.28.3
	touch $@

build/.native: $(NATIVE) $(VENV)/.installed
	cmake -S . -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython3_EXECUTABLE=$(CURDIR)/$(BIN)/python > build.log 2>&1 || { cat build.log; exit 1; }
	cmake --build build >> build.log 2>&1 || { cat build.log; exit 1; }
	mv build.log build/build.log && touch $@
native: build/.native

demo: setup
	$(BIN)/python -m deploy.demo

test: setup
	$(BIN)/python -m pytest $(TESTS)

SEED ?= 1
SEEDS ?= 1
MINUTES ?= 2
chaos: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos --seed $(SEED) --seeds $(SEEDS) --minutes $(MINUTES)

# a Ray cluster in a network namespace of its own, where its ports meet nobody else's
ray-test: setup
	unshare $(shell test `id -u` = 0 || echo --map-root-user) --net sh -c 'ip link set lo up && exec $(BIN)/python -m pytest tests/ray $(TESTS)'

# After a change below deploy/k8s.
k8s:
	kubectl kustomize deploy/k8s/overlays/ascend-a3 > deploy/k8s/sluice.yaml

# After a release: what later changes of proto/ must stay compatible with.
proto-baseline: setup
	$(BIN)/buf build --exclude-source-info -o proto/released.binpb

# Needs a Kubernetes cluster that this command starts, builds images for and stops; see docs/operations.md.
SLUICE_KUBE ?=
kube-test: setup
	@test -n "$(SLUICE_KUBE)" || { echo "set SLUICE_KUBE to the command that runs a test cluster (up, base-image, build, exec, down)"; exit 2; }
	trap '$(SLUICE_KUBE) down' EXIT; $(SLUICE_KUBE) up && $(SLUICE_KUBE) base-image && \
	$(SLUICE_KUBE) build . -f deploy/docker/Dockerfile -t localhost/sluice:cpu --build-arg BASE=localhost/python:3.11-bookworm --target cpu && \
	$(SLUICE_KUBE) exec -- env SLUICE_KUBE_TEST=1 $(BIN)/python -m pytest -v tests/kube $(TESTS)

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint && $(BIN)/buf breaking --against proto/released.binpb

docs: setup
	$(BIN)/python -m deploy.config_reference

bench: setup
	$(BIN)/python -m benchmarks.run

bench-transfer: setup build/bench/.installed
	$(BIN)/python -m benchmarks.transfer

# The engines ours is compared with, each in a folder of its own. One that cannot be had here has a row that says so.
build/bench/.installed:
	mkdir -p build/bench/debs
	-$(PIP) install --no-deps --upgrade --target build/bench/nixl nixl-cu12==1.5.1
	-$(PIP) install --no-deps --upgrade --target build/bench/mooncake mooncake-transfer-engine-non-cuda==0.3.13.post1
	-cd build/bench/debs && apt-get download -q libibverbs1 libnl-3-200 libnl-route-3-200
	-for deb in build/bench/debs/*.deb; do dpkg -x $$deb build/bench/mooncake/debian; done
	touch $@

bench-decode: setup
	$(BIN)/python -m benchmarks.decode_ops

bench-prefill: setup
	$(BIN)/python -m benchmarks.prefill

soak-prefill: setup
	$(BIN)/python -m pytest --seeds 200 --timeout 1200 tests/prefill_node/test_slow_consumers.py tests/e2e/test_slow_consumers.py

clean:
	rm -rf build proto/gen $(VENV) run *.egg-info .mypy_cache .ruff_cache .hypothesis
