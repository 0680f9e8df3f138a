#!/usr/bin/env bats
# stasis verify, and GPU content in images: what it says, and what a reader says that was written from
# docs/image-format.md alone (tests/image/read_image.py).

load helpers
load stasis_lib

setup() { setup_stasis; }
teardown() { end_stasis; }

reader() { python3 -S "$BATS_TEST_DIRNAME/../image/read_image.py" "$@"; }

# flip FILE OFFSET
flip() {
  python3 -S - "$image/$1" "$2" <<'END'
import sys
with open(sys.argv[1], "r+b") as file:
    file.seek(int(sys.argv[2]))
    byte = file.read(1)[0]
    file.seek(int(sys.argv[2]))
    file.write(bytes([byte ^ 4]))
END
}

@test "what a dump has made is verified, and so it is by a reader written from the format's page" {
  need_root "CRIU"
  start_target memory --size 4M
  dump_it
  capture stasis verify "$image" --json
  assert_equal "$status" 0
  assert_equal "$(json 'd["gpu_content"]')" None
  local bytes
  bytes=$(json 'd["image_bytes"]')
  capture reader "$image"
  assert_equal "$status" 0
  assert_equal "$(json 'd["image_bytes"]')" "$bytes"
  capture env STASIS_LIBCUDA=/no/such/driver STASIS_CRIU=/no/such/criu stasis verify "$image"
  assert_equal "$status" 0
  assert_contains "$out" "$image is whole: "
  flip criu/pages-1.img 5000
  refused 10 image-corrupt verify "$image"
  assert_contains "$err" "criu/pages-1.img has the checksum "
  capture reader "$image"
  assert_equal "$status" 1
}

@test "both readers agree about GPU content, however it was written" {
  local way seen
  for way in "none" "lz4" "zstd" "zstd --direct"; do
    rm -rf "$image"
    # shellcheck disable=SC2086
    stasis-make-image "$image" --compress $way
    capture reader "$image"
    assert_equal "$status" 0 "$out"
    case $way in
      none) assert_equal "$(json 'd["gpu_content"]["encodings"]')" "[0, 1]" ;;
      lz4) assert_equal "$(json 'd["gpu_content"]["encodings"]')" "[0, 1, 2]" ;;
      *) assert_equal "$(json 'd["gpu_content"]["encodings"]')" "[0, 1, 3]" ;;
    esac
    seen=$(json '[d["image_bytes"]] + [d["gpu_content"][k] for k in ("bytes", "zero_bytes", "duplicate_bytes", "stored_bytes")]')
    capture stasis verify "$image" --json
    assert_equal "$status" 0
    assert_equal "$(json '[d["image_bytes"]] + [d["gpu_content"][k] for k in ("bytes", "zero_bytes", "duplicate_bytes", "stored_bytes")]')" "$seen"
    assert_equal "$(json '[p["pid"] for p in d["gpu_content"]["processes"]]')" "[100, 101]"
  done
}

@test "both readers find every damage" {
  stasis-make-image "$image" --compress zstd
  cp -r "$image" "$image.whole"
  local what size
  size=$(stat -c %s "$image/gpu/index")
  for what in "gpu/index 9" "gpu/index 40" "gpu/index 200" "gpu/index $((size - 1))" "gpu/data-00 100" \
    "gpu/data-00 70000" "criu/core-100.img 3" "manifest.json 300"; do
    # shellcheck disable=SC2086
    flip $what
    refused 10 image-corrupt verify "$image"
    assert_contains "$err" "${what%% *}"
    capture reader "$image"
    assert_equal "$status" 1 "$what"
    # shellcheck disable=SC2086
    flip $what
  done
  done_by verify "$image"
  truncate -s -4096 "$image/gpu/data-00"
  refused 10 image-corrupt verify "$image"
  assert_contains "$err" "gpu/data-00 has $(stat -c %s "$image/gpu/data-00") bytes, expected $(stat -c %s "$image.whole/gpu/data-00")"
  capture reader "$image"
  assert_equal "$status" 1
  rm "$image/gpu/data-00"
  refused 10 image-corrupt verify "$image"
  cp "$image.whole/gpu/data-00" "$image/gpu"
  touch "$image/gpu/data-77"
  refused 10 image-corrupt verify "$image"
  capture reader "$image"
  assert_equal "$status" 1
}

# index_says OFFSET FORMAT VALUE: in gpu/index, which is closed by the right checksums, as any program could; a data file
# gets the size that stands there then.
index_says() {
  rm -rf "$image"
  stasis-make-image "$image" --compress lz4
  python3 -S - "$image" "$@" "$BATS_TEST_DIRNAME" <<'END'
import os, struct, subprocess, sys
image, offset, form, value, here = sys.argv[1:]
sys.path.insert(0, here)
from edit_manifest import xxh3_128
with open(image + "/gpu/index", "rb") as file: index = bytearray(file.read()[:-16])
struct.pack_into("<" + form, index, int(offset, 0), int(value, 0))
digest = xxh3_128(bytes(index))
with open(image + "/gpu/index", "wb") as file: file.write(index + bytes.fromhex(digest))
size = struct.unpack_from("<Q", index, 64)[0]
os.truncate(image + "/gpu/data-00", size)
subprocess.run([sys.executable, "-S", here + "/edit_manifest.py", image, f"""c = m["gpu_content"]
m["total_bytes"] += {size} - c["data_sizes"][0]
c["index_xxh3"], c["data_sizes"] = "{digest}", [{size}]"""], check=True)
END
}

@test "what an index says is judged by both readers alike, whatever its checksums" {
  stasis-make-image "$image" --compress lz4
  local stream=$((64 + 8)) first
  first=$(python3 -IS -c 'import struct, sys
index = open(sys.argv[1], "rb").read()
files, streams, _, ranges = struct.unpack_from("<3IQ", index, 20)
print(64 + 8 * files + 16 * streams + 40 * ranges)' "$image/gpu/index")
  # Nothing is wrong with what is not there to be judged.
  index_says 28 I 7
  done_by verify "$image"
  capture reader "$image"
  assert_equal "$status" 0 "$out"
  local what
  # The version, the chunks' size, a size of a data file, how many there are of what; a process twice, and one
  # that is not there; then of the first chunk the digest, position, stored bytes, encoding, file and what is 0.
  for what in "8 I 0" "16 I 65535" "16 I 32768" "64 Q 0x400001" "20 I 2" "24 I 1" "32 Q 3" "40 Q 81" \
    "$((stream + 16)) I 100" "$stream I 77" "$((stream + 4)) I 1" "$((stream + 8)) Q 70000" \
    "$first B 1" "$((first + 16)) Q 1" "$((first + 16)) Q 0x7ffffffffffff000" "$((first + 24)) I 0" \
    "$((first + 28)) B 9" "$((first + 29)) B 1" "$((first + 30)) H 1"; do
    # shellcheck disable=SC2086
    index_says $what
    refused 10 image-corrupt verify "$image"
    capture reader "$image"
    assert_equal "$status:${out%%:*}" 1:corrupt "$what"
  done
  for what in "8 I 2" "12 I 1"; do
    # shellcheck disable=SC2086
    index_says $what
    refused 10 image-version verify "$image"
    capture reader "$image"
    assert_equal "$status:${out%%:*}" 1:newer "$what"
  done
}

@test "a directory of an image that is a link is damage to both readers" {
  local part
  for part in gpu criu; do
    rm -rf "$image"
    stasis-make-image "$image"
    mv "$image/$part" "$image.$part"
    ln -s "../${image##*/}.$part" "$image/$part"
    refused 10 image-corrupt verify "$image"
    capture reader "$image"
    assert_equal "$status" 1
    assert_contains "$out" "$part is no directory"
  done
}

@test "what is no file in the place of one is damage to both readers, and holds up neither" {
  stasis-make-image "$image"
  cp -r "$image" "$image.whole"
  local path make
  for path in gpu/data-00 gpu/index criu/core-100.img manifest.json; do
    for make in mkfifo mkdir "ln -s $image.whole/$path" "ln -s $path" "python3 -c 'import socket, sys; socket.socket(1).bind(sys.argv[1])'"; do
      rm "$image/$path"
      (cd "${image%/*}" && eval "$make" "image/$path")
      refused 10 image-corrupt verify "$image"
      assert_contains "$err" "$path"
      capture timeout 60 python3 -S "$BATS_TEST_DIRNAME/../image/read_image.py" "$image"
      assert_equal "$status" 1 "$make $path"
      rm -rf "${image:?}/$path"
      cp "$image.whole/$path" "$image/$path"
    done
  done
  done_by verify "$image"
}

@test "a damaged chunk is named with its place, and what was expected and found" {
  stasis-make-image "$image"
  flip gpu/data-00 65600
  refused 10 image-corrupt verify "$image"
  [[ $err =~ "gpu/data-00: chunk 1 of process 100 (65536 bytes at 65536 of its GPU content, in the file 65536 at 65536) has the checksum "[0-9a-f]{32}", expected "[0-9a-f]{32} ]]
  capture stasis verify "$image" --json
  assert_equal "$status" 10
  assert_equal "$(json 'd["error"]["code"]')" image-corrupt
}

@test "a reader that knows nothing of GPU content is told by the manifest that it cannot use the image" {
  stasis-make-image "$image"
  python3 -S "$BATS_TEST_DIRNAME/edit_manifest.py" "$image" "m['requires'].append('more')"
  refused 10 image-version verify "$image"
  assert_contains "$err" 'needs the feature "more"'
  capture reader "$image"
  assert_contains "$out" "newer: manifest.json"
  python3 -S "$BATS_TEST_DIRNAME/edit_manifest.py" "$image" "m['requires'] = []"
  refused 10 image-corrupt verify "$image"
}

@test "what the parts of a manifest have to do with each other is judged by both readers alike" {
  local statements
  for statements in "m['files'].reverse()" "m['processes'].append(m['processes'][1])" "m['sync'] = 'x'" \
    "del m['phases']" "m['root_pid'] = 5" "m['more'] = [[[[[[[[]]]]]]]]" "m['more'] = '\\ud800'" \
    "m['processes'] += [process(300, 301), process(301, 300)]" \
    "m['processes'][1].update(cuda=False); del m['processes'][1]['cuda_state']"; do
    stasis-make-image "$image"
    python3 -S "$BATS_TEST_DIRNAME/edit_manifest.py" "$image" "$statements"
    refused 10 image-corrupt verify "$image"
    capture reader "$image"
    [[ $status == 1 && $out == corrupt:* ]] || { echo "$statements: $out$err" >&2; return 1; }
    rm -r "$image"
  done
}

@test "GPU content is shown by inspect and report, and counts as part of the image" {
  stasis-make-image "$image" --compress zstd
  capture stasis inspect "$image" --verify --json
  assert_equal "$(json 'd["image_bytes"] == sum(s["bytes"] for s in d["sizes"])')" True
  assert_equal "$(json '[s["what"] for s in d["sizes"]][:2]')" "['GPU content of process 100', 'GPU content of process 101']"
  assert_equal "$(json '[c["ok"] for c in d["checks"] if c["id"] == "checksums"]')" "[True]"
  assert_equal "$(json 'd["gpu_content"]["bytes"]')" $((2 * (40 * 65536 + 5000)))
  capture stasis inspect "$image"
  [[ $out == *"content "*"5.01 MiB of GPU memory in "*" are zeros, "*" are repetitions, stored once"*"process 100: "* ]]
  capture stasis report "$image" -o "$BATS_TEST_TMPDIR/report.html"
  grep -q "GPU content of process 100" "$BATS_TEST_TMPDIR/report.html"
  grep -q '<th scope="row">GPU memory</th><td class="n" data-label="In use">5.01 MiB<' "$BATS_TEST_TMPDIR/report.html"
  # What is damaged is not shown, and said.
  flip gpu/index 100
  capture stasis inspect "$image" --json
  assert_equal "$(json 'd["gpu_content"]')" None
  assert_equal "$(json '[c["error"]["code"] for c in d["checks"] if c["id"] == "files"]')" "['image-corrupt']"
  assert_equal "$(json 'd["image_bytes"] == sum(s["bytes"] for s in d["sizes"])')" True
}
