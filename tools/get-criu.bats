# tools/get-criu without a network: what it takes, what it refuses, and what it leaves behind.
# The Debian mirror is a folder made here: small packages of this machine's own loader and libc, with a
# program that answers like criu, signed by a key made here.

setup_file() {
  export SCRATCH REPO ROOT SUITE=trixie
  ROOT=$(cd "$BATS_TEST_DIRNAME/.." && pwd)
  SCRATCH=$(mktemp -d)
  REPO=$SCRATCH/mirror
  chmod 755 "$SCRATCH"
  command -v gpg >/dev/null && command -v gcc >/dev/null && command -v patchelf >/dev/null &&
    command -v apt-get >/dev/null && make_mirror
}

teardown_file() { rm -rf "$SCRATCH"; }

setup() {
  T=$(mktemp -d "$SCRATCH/test.XXXXXX")
  chmod 755 "$T"
  unset STASIS_DEBIAN_MIRROR STASIS_DEBIAN_KEYRING
}

# make_deb SUITE NAME VERSION DEPENDS: packs $SCRATCH/NAME, adds it to the mirror's index.
make_deb() {
  local dir=$SCRATCH/$2 file=$2_$3_amd64.deb
  mkdir -p "$dir/DEBIAN" "$REPO/dists/$1/main/binary-amd64"
  printf 'Package: %s\nVersion: %s\nArchitecture: amd64\nMaintainer: tests <tests@example.org>\nDescription: test\n%s' \
    "$2" "$3" "${4:+Depends: $4
}" >"$dir/DEBIAN/control"
  dpkg-deb --root-owner-group -b "$dir" "$REPO/pool/$file" >/dev/null
  {
    cat "$dir/DEBIAN/control"
    printf 'Filename: pool/%s\nSize: %s\nSHA256: %s\n\n' "$file" "$(stat -c %s "$REPO/pool/$file")" \
      "$(sha256sum <"$REPO/pool/$file" | cut -d' ' -f1)"
  } >>"$REPO/dists/$1/main/binary-amd64/Packages"
}

make_key() {
  gpg --homedir "$SCRATCH/gpg" --batch --quiet --passphrase '' --quick-gen-key "$1@example.org" rsa2048 sign
  gpg --homedir "$SCRATCH/gpg" --batch --quiet --export "$1@example.org" >"$SCRATCH/$1.gpg"
}

# sign SUITE KEY
sign() {
  local index=main/binary-amd64/Packages
  cd "$REPO/dists/$1"
  printf 'Origin: test\nSuite: %s\nCodename: %s\nArchitectures: amd64\nComponents: main\nDate: %s\nSHA256:\n %s %s %s\n' \
    "$1" "$1" "$(LC_ALL=C date -u -R)" "$(sha256sum <$index | cut -d' ' -f1)" "$(stat -c %s $index)" $index >Release
  gpg --homedir "$SCRATCH/gpg" --batch --quiet -u "$2@example.org" --clearsign -o InRelease Release
}

make_mirror() {
  local lib=usr/lib/x86_64-linux-gnu patchelf library keys=debian-archive-keyring
  mkdir -p "$REPO/pool" "$SCRATCH/gpg"
  chmod 700 "$SCRATCH/gpg"
  make_key right
  make_key wrong
  make_key old

  mkdir -p "$SCRATCH/libc6/$lib"
  cp -L /lib64/ld-linux-x86-64.so.2 "$SCRATCH/libc6/$lib/"
  patchelf=$(command -v patchelf)
  mkdir -p "$SCRATCH/patchelf/usr/bin"
  cp -L "$patchelf" "$SCRATCH/patchelf/usr/bin/"
  ldd "$patchelf" | sed -n 's/.*=> \(\/[^ ]*\).*/\1/p' | while read -r library; do
    cp -L "$library" "$SCRATCH/libc6/$lib/"
  done

  mkdir -p "$SCRATCH/criu/usr/sbin" "$SCRATCH/criu/usr/share/doc/criu"
  echo "free" >"$SCRATCH/criu/usr/share/doc/criu/copyright"
  cat >"$SCRATCH/criu.c" <<'EOF'
#include <stdio.h>
#include <string.h>
int main(int argc, char **argv) {
  if (argc > 1 && !strcmp(argv[1], "--version")) return puts("Version: 4.2.1") < 0;
  if (argc > 1 && !strcmp(argv[1], "check")) return puts("Looks good.") < 0;
  return 1;
}
EOF
  gcc -o "$SCRATCH/criu/usr/sbin/criu" "$SCRATCH/criu.c"

  mkdir -p "$SCRATCH/libcriu-dev/usr/include/criu" "$SCRATCH/libcriu-dev/usr/share/doc/libcriu-dev"
  echo "enum { CR_PLUGIN_HOOK__CHECKPOINT_DEVICES };" >"$SCRATCH/libcriu-dev/usr/include/criu/criu-plugin.h"
  echo "free" >"$SCRATCH/libcriu-dev/usr/share/doc/libcriu-dev/copyright"

  make_deb "$SUITE" libc6 2.41-1 ''
  make_deb "$SUITE" libcriu-dev 4.2.1-1 'something-else-that-is-not-needed'
  make_deb "$SUITE" criu 4.2.1-1 libc6
  make_deb "$SUITE" patchelf 0.18-1 libc6
  (sign "$SUITE" right) >&2
  # An older release, which brings the newer key.
  mkdir -p "$SCRATCH/$keys/usr/share/keyrings"
  cp "$SCRATCH/right.gpg" "$SCRATCH/$keys/usr/share/keyrings/$keys.gpg"
  make_deb bullseye $keys 2021.1 ''
  (sign bullseye old) >&2
  gpgconf --homedir "$SCRATCH/gpg" --kill all
  touch "$SCRATCH/mirror-is-whole"
}

need_mirror() {
  [ -e "$SCRATCH/mirror-is-whole" ] || skip "gpg, gcc, patchelf or apt is not installed"
}

# Runs get-criu with only system tools and, first on PATH, $T/bin.
get_criu() {
  run env PATH="$T/bin:/usr/bin:/bin" "$ROOT/tools/get-criu" "$@"
  printf '%s\n' "$output"
}

private() {
  get_criu --force-private --prefix "$T/criu" --mirror "file:$REPO" --keyring "$SCRATCH/right.gpg" --suite "$SUITE" "$@"
}

# fake_criu VERSION CHECK_STATUS: a criu on PATH.
fake_criu() {
  mkdir -p "$T/bin"
  cat >"$T/bin/criu" <<EOF
#!/bin/sh
case \$1 in
  --version) echo "Version: $1" ;;
  check) echo "The word of check."; exit $2 ;;
  *) exit 1 ;;
esac
EOF
  chmod +x "$T/bin/criu"
}

last_line() { printf '%s\n' "$output" | tail -n 1; }

@test "a criu 4.2 on PATH whose check passes is taken" {
  fake_criu 4.2.1 0
  get_criu --prefix "$T/criu"
  [ "$status" -eq 0 ]
  [ "$(last_line)" = "$T/bin/criu" ]
  [ ! -e "$T/criu" ]
}

@test "standard output holds the path and nothing else" {
  fake_criu 4.2.1 0
  [ "$(PATH="$T/bin:/usr/bin:/bin" "$ROOT/tools/get-criu" --prefix "$T/criu" 2>/dev/null)" = "$T/bin/criu" ]
}

@test "a criu 3.17 on PATH is refused" {
  fake_criu 3.17.1 0
  get_criu --check --prefix "$T/criu"
  [ "$status" -eq 1 ]
  [[ $output == *"is version 3.17.1; 4.0 or newer is needed"* ]]
}

@test "a criu 4.2 on PATH that neither passes its check nor dumps is refused, with what check said" {
  [ "$(id -u)" -eq 0 ] || skip "needs root"
  fake_criu 4.2.1 1
  get_criu --check --prefix "$T/criu"
  [ "$status" -eq 1 ]
  [[ $output == *"The word of check."* ]]
  [[ $output == *"could not dump and restore a small process"* ]]
}

@test "on Linux 6.16 and newer, a criu 4.1 that can't dump sockets is refused" {
  [ "$(id -u)" -eq 0 ] || skip "needs root"
  fake_criu 4.1.1 0
  printf '#!/bin/sh\necho 6.18.1-amd64\n' >"$T/bin/uname"
  chmod +x "$T/bin/uname"
  get_criu --check --prefix "$T/criu"
  [ "$status" -eq 1 ]
  [[ $output == *"versions before 4.2 can't dump sockets"* ]]
  printf '#!/bin/sh\necho 6.12.1-amd64\n' >"$T/bin/uname"
  get_criu --check --prefix "$T/criu"
  [ "$status" -eq 0 ]
}

@test "a criu 4.x whose check fails but which dumps and restores is taken" {
  [ "$(id -u)" -eq 0 ] || skip "needs root"
  real=$("$ROOT/tools/get-criu" --check 2>/dev/null) || skip "no usable criu here"
  mkdir -p "$T/bin"
  printf '#!/bin/sh\n[ "$1" = check ] && exit 1\nexec %s "$@"\n' "$real" >"$T/bin/criu"
  chmod +x "$T/bin/criu"
  get_criu --check --prefix "$T/criu"
  [ "$status" -eq 0 ]
  [ "$(last_line)" = "$T/bin/criu" ]
}

@test "a private folder is made from signed packages, and found again" {
  need_mirror
  private
  [ "$status" -eq 0 ]
  [ "$(last_line)" = "$T/criu/usr/sbin/criu" ]
  [ "$("$T/criu/usr/sbin/criu" --version)" = "Version: 4.2.1" ]
  readelf -l "$T/criu/usr/sbin/criu" | grep -F "$T/criu/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"
  [ -e "$T/criu/usr/share/doc/criu/copyright" ]
  before=$(stat -c %i "$T/criu")
  get_criu --force-private --prefix "$T/criu" --mirror "file:/nowhere"
  [ "$status" -eq 0 ]
  [ "$(stat -c %i "$T/criu")" = "$before" ]
}

@test "for another machine a private folder is made and not tried" {
  need_mirror
  private
  [[ $output == *"criu check"* ]]
  rm -r "$T/criu"
  private --untried
  [ "$status" -eq 0 ]
  [ "$(last_line)" = "$T/criu/usr/sbin/criu" ]
  [ -x "$T/criu/usr/sbin/criu" ]
  [[ $output != *"criu check"* ]]
  get_criu --untried
  [ "$status" -eq 2 ]
}

@test "the header for plugins is made from a signed package, and found again" {
  need_mirror
  [ ! -e /usr/include/criu/criu-plugin.h ] || skip "this machine has CRIU's headers"
  get_criu --headers --check --prefix "$T/criu"
  [ "$status" -eq 1 ]
  [[ $output == *"tools/get-criu --headers"* ]]
  get_criu --headers --prefix "$T/criu" --mirror "file:$REPO" --keyring "$SCRATCH/wrong.gpg" --suite "$SUITE"
  [ "$status" -eq 1 ]
  [ ! -e "$T/criu-headers" ]
  get_criu --headers --prefix "$T/criu" --mirror "file:$REPO" --keyring "$SCRATCH/right.gpg" --suite "$SUITE"
  [ "$status" -eq 0 ]
  [ "$(last_line)" = "$T/criu-headers/usr/include" ]
  [ -e "$T/criu-headers/usr/include/criu/criu-plugin.h" ]
  [ -e "$T/criu-headers/usr/share/doc/libcriu-dev/copyright" ]
  [ ! -e "$T/criu" ]
  get_criu --headers --prefix "$T/criu" --mirror "file:/nowhere"
  [ "$status" -eq 0 ]
}

@test "a package that was changed after signing is refused, and nothing is left" {
  need_mirror
  cp -r "$REPO" "$T/mirror"
  # One byte in the middle, so that the size stays.
  printf 'X' | dd of="$T/mirror/pool/criu_4.2.1-1_amd64.deb" bs=1 seek=1000 conv=notrunc status=none
  get_criu --force-private --prefix "$T/criu" --mirror "file:$T/mirror" --keyring "$SCRATCH/right.gpg" --suite "$SUITE"
  [ "$status" -eq 1 ]
  [[ $output == *"Hash Sum mismatch"* ]]
  [ -z "$(find "$T" -maxdepth 1 -name 'criu*' ! -name criu.lock)" ]
}

@test "a mirror whose lists are past their date is said to be frozen, with what to do" {
  need_mirror
  [[ $(apt-config dump Acquire::Check-Valid-Until) != *'"false"'* ]] || skip "apt takes lists of any date here"
  cp -r "$REPO" "$T/mirror"
  cd "$T/mirror/dists/$SUITE"
  sed -i '/^Suite:/a Valid-Until: Mon, 01 Jan 2024 00:00:00 UTC' Release
  rm InRelease
  gpg --homedir "$SCRATCH/gpg" --batch --quiet -u right@example.org --clearsign -o InRelease Release
  gpgconf --homedir "$SCRATCH/gpg" --kill all
  get_criu --force-private --prefix "$T/criu" --mirror "file:$T/mirror" --keyring "$SCRATCH/right.gpg" --suite "$SUITE"
  [ "$status" -eq 1 ]
  [[ $output == *"is expired"* ]]
  [[ $output == *"a copy of an earlier day (frozen)"* ]]
  [[ $output == *"Check-Valid-Until"* ]]
}

@test "packages signed with another key are refused" {
  need_mirror
  get_criu --force-private --prefix "$T/criu" --mirror "file:$REPO" --keyring "$SCRATCH/wrong.gpg" --suite "$SUITE"
  [ "$status" -eq 1 ]
  [ ! -e "$T/criu" ]
}

@test "old keys lead to the newer ones that they vouch for" {
  need_mirror
  get_criu --force-private --prefix "$T/criu" --mirror "file:$REPO" --keyring "$SCRATCH/old.gpg" --suite "$SUITE"
  [ "$status" -eq 0 ]
  [[ $output == *"newer ones that they vouch for"* ]]
  [ "$("$T/criu/usr/sbin/criu" --version)" = "Version: 4.2.1" ]
}

@test "a mirror that is not there: says so, and what to do" {
  need_mirror
  get_criu --force-private --prefix "$T/criu" --mirror "file:$T/nowhere" --keyring "$SCRATCH/right.gpg" --suite "$SUITE"
  [ "$status" -eq 1 ]
  [[ $output == *"--mirror"* ]]
  [[ $output == *"--unpack"* ]]
  [ -z "$(find "$T" -maxdepth 1 -name 'criu*' ! -name criu.lock)" ]
}

@test "a run that is killed leaves no half folder, and the next run clears up" {
  need_mirror
  mkdir -p "$T/bin"
  # Unpacking takes for ever, so that the kill comes in the middle.
  printf '#!/bin/sh\ntouch %s/reached\nexec sleep 60\n' "$T" >"$T/bin/dpkg"
  chmod +x "$T/bin/dpkg"
  PATH="$T/bin:/usr/bin:/bin" setsid "$ROOT/tools/get-criu" --force-private --prefix "$T/criu" \
    --mirror "file:$REPO" --keyring "$SCRATCH/right.gpg" --suite "$SUITE" >/dev/null 2>&1 3>&- &
  pid=$!
  for _ in $(seq 600); do [ -e "$T/reached" ] && break || sleep 0.1; done
  [ -e "$T/reached" ]
  kill -9 -- "-$pid"
  [ ! -e "$T/criu" ]
  [ -n "$(find "$T" -maxdepth 1 -name 'criu.tmp.*')" ]
  rm -r "$T/bin"
  private
  [ "$status" -eq 0 ]
  [ -z "$(find "$T" -maxdepth 1 -name 'criu.tmp.*')" ]
}

@test "a folder that lost a library is made again" {
  need_mirror
  private
  rm "$T/criu/usr/lib/x86_64-linux-gnu/libc.so.6"
  private
  [ "$status" -eq 0 ]
  [ "$("$T/criu/usr/sbin/criu" --version)" = "Version: 4.2.1" ]
}

@test "two runs at once: one makes the folder, both find it" {
  need_mirror
  private_in_background() {
    PATH=/usr/bin:/bin "$ROOT/tools/get-criu" --force-private --prefix "$T/criu" --mirror "file:$REPO" \
      --keyring "$SCRATCH/right.gpg" --suite "$SUITE" >"$T/out.$1" 2>"$T/err.$1" 3>&- &
  }
  private_in_background 1
  first=$!
  private_in_background 2
  second=$!
  wait $first
  wait $second
  [ "$(cat "$T/out.1")" = "$T/criu/usr/sbin/criu" ]
  [ "$(cat "$T/out.2")" = "$T/criu/usr/sbin/criu" ]
  [ "$(cat "$T"/err.? | grep -c '^Made')" -eq 1 ]
}

@test "a pack brings the folder back at its place" {
  need_mirror
  private --pack "$T/pack.tar.gz"
  [ "$status" -eq 0 ]
  (cd "$T" && sha256sum -c pack.tar.gz.sha256)
  rm -r "$T/criu"
  get_criu --unpack "$T/pack.tar.gz"
  [ "$status" -eq 0 ]
  [ "$(last_line)" = "$T/criu/usr/sbin/criu" ]
  [ "$("$T/criu/usr/sbin/criu" --version)" = "Version: 4.2.1" ]
}

@test "a pack that differs from its checksum is refused, and what is installed stays" {
  need_mirror
  private --pack "$T/pack.tar.gz"
  before=$(stat -c %i "$T/criu")
  printf 'X' >>"$T/pack.tar.gz"
  get_criu --unpack "$T/pack.tar.gz"
  [ "$status" -eq 1 ]
  [[ $output == *"is not what was packed"* ]]
  [ "$(stat -c %i "$T/criu")" = "$before" ]
}

@test "a pack whose content was changed is refused even without its checksum" {
  need_mirror
  private --pack "$T/pack.tar.gz"
  mkdir "$T/open"
  tar -C "$T/open" -xzf "$T/pack.tar.gz"
  for change in 'echo x >>usr/lib/x86_64-linux-gnu/libc.so.6' 'echo x >usr/added' 'ln -s /etc/passwd usr/link'; do
    rm -rf "$T/changed" && cp -a "$T/open" "$T/changed"
    (cd "$T/changed/criu" && eval "$change")
    tar -C "$T/changed" -czf "$T/changed.tar.gz" criu
    get_criu --unpack "$T/changed.tar.gz" --unchecked
    [ "$status" -eq 1 ]
    [[ $output == *"the pack "* ]]
  done
}

@test "a pack without a checksum is refused, unless one insists" {
  tar -C "$T" -czf "$T/pack.tar.gz" --files-from /dev/null
  get_criu --unpack "$T/pack.tar.gz"
  [ "$status" -eq 1 ]
  [[ $output == *"tells $T/pack.tar.gz from a forgery"* ]]
  [[ $output == *"--unchecked"* ]]
  get_criu --unpack "$T/pack.tar.gz" --unchecked
  [ "$status" -eq 1 ]
  [[ $output == *"told not to ask for a checksum"* ]]
  [[ $output != *forgery.*--unchecked* ]]
}

@test "a pack is refused at another place than its own" {
  need_mirror
  private --pack "$T/pack.tar.gz"
  get_criu --unpack "$T/pack.tar.gz" --prefix "$T/elsewhere"
  [ "$status" -eq 1 ]
  [[ $output == *"works only at $T/criu"* ]]
  [ ! -e "$T/elsewhere" ]
}

@test "a folder that is not ours is never replaced" {
  mkdir -p "$T/criu"
  echo precious >"$T/criu/file"
  get_criu --force-private --prefix "$T/criu" --mirror "file:$T/nowhere"
  [ "$status" -eq 1 ]
  [[ $output == *"this script did not make it"* ]]
  [ "$(cat "$T/criu/file")" = precious ]
}

@test "a place that can't be written: says so, and what to do" {
  get_criu --force-private --prefix /proc/stasis/criu --mirror "file:$T/nowhere"
  [ "$status" -eq 1 ]
  [[ $output == *"can't write to /proc/stasis"* ]]
  [[ $output == *"--prefix"* ]]
}

@test "odd prefixes and unknown options are usage errors" {
  for prefix in relative /opt "/tmp/a b" /tmp/a:b /tmp/x/ /tmp/../etc; do
    get_criu --prefix "$prefix"
    [ "$status" -eq 2 ]
  done
  get_criu --nonsense
  [ "$status" -eq 2 ]
  get_criu --pack
  [ "$status" -eq 2 ]
  get_criu --pack file.zip
  [ "$status" -eq 2 ]
}

@test "help names every option" {
  get_criu --help
  [ "$status" -eq 0 ]
  for option in check force-private rebuild prefix mirror keyring suite untried pack unpack sha256; do
    [[ $output == *"--$option"* ]]
  done
}
