#!/usr/bin/env bats
# tools/release: what it refuses, on a small tree with the files that it looks at; and, once, a whole release of the
# packages that there are.

setup() {
  command -v git >/dev/null || skip "there is no git"
  ROOT=$(cd "$BATS_TEST_DIRNAME/.." && pwd)
  TREE=$(mktemp -d)
  cd "$TREE"
  mkdir -p tools src/base include/stasis docs/man
  cp -r "$ROOT/tools/lib" "$ROOT/tools/release" "$ROOT/tools/package" tools/
  VERSION=$(sed -nE 's/^project\(stasis VERSION ([0-9.]+) .*/\1/p' "$ROOT/CMakeLists.txt")
  local file
  for file in CMakeLists.txt CHANGELOG.md src/base/version.h include/stasis/stasis.h docs/c-api.md docs/man/stasis.1; do
    cp "$ROOT/$file" "$file"
  done
  cp "$ROOT"/docs/man/*.[15] docs/man/
  printf '#!/bin/sh\necho "tests were run" >&2\nexit ${TESTS_END_WITH:-0}\n' >tools/test
  chmod +x tools/test
  echo /dist >.gitignore
  git init -q .
  commit
}

teardown() { [ -z "${TREE:-}" ] || rm -rf "$TREE"; }

commit() { git add -A && git -c user.name=N -c user.email=n@example.org commit -q -m "A commit"; }
ready() { run tools/release --check </dev/null; printf '%s\n' "$output"; }

@test "the source as it is has one version everywhere, and a section of the changelog" {
  ready
  [ "$status" -eq 0 ]
  [[ $output == *"ready: $VERSION"* ]]
}

@test "another version in one place, a change that is not committed, a tag of another commit: each is named" {
  sed -i 's/kVersion = ".*"/kVersion = "9.9.9"/' src/base/version.h
  sed -i "s/^## $VERSION\$/## Unreleased/" CHANGELOG.md
  commit
  git tag "v$VERSION"
  echo more >>CHANGELOG.md
  commit
  echo more >>CHANGELOG.md
  ready
  [ "$status" -eq 1 ]
  [[ $output == *"src/base/version.h has another version than CMakeLists.txt ($VERSION)"* ]]
  [[ $output == *"CHANGELOG.md has no section \"## $VERSION\""* ]]
  [[ $output == *"not committed"* ]]
  [[ $output == *"v$VERSION is the tag of another commit"* ]]
  # And no release is made of it.
  run tools/release --tested --url https://example.org --maintainer 'N <n@example.org>' </dev/null
  [ "$status" -eq 1 ]
  [[ $output == *"nothing was made"* ]]
}

@test "who answers for it has to be said, and tests have to pass" {
  run env -u STASIS_HOMEPAGE -u STASIS_MAINTAINER tools/release </dev/null
  [ "$status" -eq 1 ]
  [[ $output == *"a release names its home page (URL)"* && $output == *"tools/release --url URL"* ]]
  run env -u STASIS_MAINTAINER tools/release --url https://example.org </dev/null
  [ "$status" -eq 1 ]
  [[ $output == *"--maintainer \"NAME <ADDRESS>\""* ]]
  TESTS_END_WITH=1 run tools/release --url https://example.org --maintainer 'N <n@example.org>' </dev/null
  [ "$status" -eq 1 ]
  [[ $output == *"tests were run"*"did not pass; nothing was made"* ]]
  [ ! -e dist ]
  run tools/package --url ftp://example.org
  [ "$status" -eq 2 ]
  run tools/package --maintainer n@example.org
  [ "$status" -eq 2 ]
  [[ $output == *'NAME <ADDRESS>, not "n@example.org"'* ]]
}

# bats test_tags=long
@test "a release has packages of that maintainer and home page, the source, notes, and sums that hold" {
  [ -n "${STASIS_BUILD:-}" ] || skip "no build folder (STASIS_BUILD)"
  command -v dpkg-shlibdeps >/dev/null || skip "there is no dpkg-dev"
  run tools/release --tested --build "$STASIS_BUILD" --url https://example.org/stasis --maintainer 'Jo Doe <jo@example.org>' </dev/null
  printf '%s\n' "$output"
  [ "$status" -eq 0 ]
  [[ $output == *"git tag -a v$VERSION"* ]]
  cd "dist/$VERSION"
  sha256sum -c --quiet SHA256SUMS
  [ "$(dpkg-deb -f stasis_*.deb Maintainer)" = "Jo Doe <jo@example.org>" ]
  [ "$(dpkg-deb -f stasis_*.deb Homepage)" = https://example.org/stasis ]
  dpkg-deb -x stasis_*.deb x
  [[ $(gzip -dc x/usr/share/doc/stasis/changelog.Debian.gz) == "stasis ($VERSION-1)"*" -- Jo Doe <jo@example.org>  "* ]]
  tar -tzf "stasis-$VERSION.tar.gz" | grep -x "stasis-$VERSION/CMakeLists.txt"
  grep -qx "# Stasis $VERSION" RELEASE-NOTES.md
  grep -q '^| stasis_.*\.deb | [0-9]' RELEASE-NOTES.md
  grep -qF "$(git -C "$TREE" rev-parse HEAD)" RELEASE-NOTES.md
}
