#!/usr/bin/env bats
# deploy/kubernetes: the manifests are what Kubernetes knows; and what the pod asks for, given to runc in the place
# of a kubelet, is enough for the job to be saved when it has to go, and to go on in another container. On the
# simulated driver, with the real CRIU.

load helpers
load stasis_lib

setup() {
  setup_stasis
  manifests=$BATS_TEST_DIRNAME/../../deploy/kubernetes
  tool=(/usr/bin/python3 "$BATS_TEST_DIRNAME/pod_manifests.py")
  bundle=$BATS_TEST_TMPDIR/bundle
  name=stasis-pod-${BATS_RUN_TMPDIR##*/}
}
teardown() {
  [[ ! -d ${bundle:-/nowhere} ]] || engine delete --force "$name" >/dev/null 2>&1 || true
  end_stasis
}

# The tool, or the reason to skip.
run_tool() {
  capture "${tool[@]}" "$@"
  [[ $status != 77 ]] || skip "$out"
}
engine() { timeout -k 5 60 runc --root "$BATS_TEST_TMPDIR/runc" "$@" </dev/null 3>&-; }

@test "the manifests have the fields of Kubernetes, and no others" {
  run_tool validate "$manifests"/*.yaml
  assert_equal "$out" $'\n'
  assert_equal "$status" 0
  # And it would see one that is wrong.
  sed 's/restartPolicy:/restartpolicy:/; s/runAsUser: 0/runAsUser: root/; /mountPath/d' \
    "$manifests/job.yaml" >"$BATS_TEST_TMPDIR/wrong.yaml"
  run_tool validate "$BATS_TEST_TMPDIR/wrong.yaml"
  assert_equal "$status" 1
  assert_contains "$out" "restartpolicy: V1PodSpec has no such field"
  assert_contains "$out" "runAsUser: int is wanted, and there is 'root'"
  assert_contains "$out" "volumeMounts[0]: Invalid value for \`mount_path\`"
}

@test "the image that the pages build has a CRIU, got as Containerfile gets it" {
  local source=$BATS_TEST_DIRNAME/../.. page dockerfile line
  dockerfile=$source/deploy/containers/pytorch.Dockerfile
  line='docker build -f deploy/containers/pytorch.Dockerfile --build-arg CRIU=yes -t pytorch-stasis-criu .'
  for page in "$dockerfile" "$manifests/README.md" "$source/docs/operators.md"; do grep -qF -- "$line" "$page"; done
  # Of the last stage, which the default leaves as it was.
  assert_equal "$(sed -n '/^FROM/h; /^FROM/!H; ${g;p}' "$dockerfile" | grep -x 'ARG CRIU=.*')" "ARG CRIU=no"
  line=$(grep -o 'stasis-get-criu --[^;&]*[a-z]' "$source/Containerfile")
  [[ -n $line ]]
  grep -qF "if [ \"\$CRIU\" = yes ]; then $line; fi && \\" "$dockerfile"
}

# pod: a container as the manifest wants it, running $TARGET_STATUS's workload.
pod() {
  mkdir -p "$bundle/rootfs"
  (cd "$bundle" && rm -f config.json && runc spec)
  LD_LIBRARY_PATH=${STASIS_LIBCUDA%/*} STASIS_CRIU=$(real_criu) run_tool bundle "$manifests/job.yaml" "$bundle" \
    "/images=$BATS_TEST_TMPDIR/volume" "$STASIS_BUILD=$STASIS_BUILD" "$STASIS_SIM_DIR=$STASIS_SIM_DIR" \
    "/opt/stasis=/opt/stasis" -- stasis-workload memory --size 4M --pause-ms 20 --status /images/status
  grace=$out
  engine run --bundle "$bundle" "$name" >"$BATS_TEST_TMPDIR/log-$1" 2>&1 &
  POD=$!
  at_end_kill "$POD"
}

@test "a pod that has to go is saved within its grace, and the next one goes on" {
  need_root "containers"
  command -v runc >/dev/null || skip "there is no runc (Debian's package runc)"
  [[ $(real_criu) == /opt/stasis/* ]] || skip "the container is to have the CRIU of tools/get-criu"
  mkdir "$BATS_TEST_TMPDIR/volume"
  TARGET_STATUS=$BATS_TEST_TMPDIR/volume/status
  pod 1
  wait_until 60 target_is_up || { cat "$BATS_TEST_TMPDIR/log-1" >&2; return 1; }
  local before begun=$SECONDS code=0
  before=$(target_round)
  # As the kubelet: to the first process of the container.
  engine kill "$name" TERM
  wait "$POD" || code=$?
  assert_equal "$code" 75 "$(<"$BATS_TEST_TMPDIR/log-1")"
  ((SECONDS - begun < grace))
  gpu_is_free
  pod 2
  wait_until 60 grep -q "goes on from /images/train/000001" "$BATS_TEST_TMPDIR/log-2" || { cat "$BATS_TEST_TMPDIR/log-2" >&2; return 1; }
  wait_until 60 target_is_past $((before + 5))
  engine kill "$name" INT
  wait "$POD" || code=$?
  assert_equal "$code" 130
}
