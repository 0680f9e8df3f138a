# Completion of stasis for bash. Made by tools/manual-pages.
_stasis() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} verb='' words='' i
  COMPREPLY=()
  # "--sync=d" comes in three words.
  if [[ $word == '=' ]]; then
    word=''
  elif [[ $before == '=' ]]; then
    before=${COMP_WORDS[COMP_CWORD - 2]}
  fi
  for ((i = 1; i < COMP_CWORD; ++i)); do
    [[ ${COMP_WORDS[i]} == -* ]] || { verb=${COMP_WORDS[i]} && break; }
  done
  case $verb:$before in
    run:--name) :; return ;;
    run:-D|run:--images-dir) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$word"); return ;;
    run:--every) :; return ;;
    run:--on-signal) :; return ;;
    run:--keep) :; return ;;
    run:--grace) :; return ;;
    run:--exit-code) :; return ;;
    run:--once) :; return ;;
    run:--device-map|run:--map) :; return ;;
    run:--refresh-env) :; return ;;
    run:--ring) :; return ;;
    run:--group) :; return ;;
    run:--parts) :; return ;;
    run:--part) :; return ;;
    run:--trace) :; return ;;
    run:--metrics) :; return ;;
    attach:-t|attach:--timeout) :; return ;;
    attach:--watch-graphs) :; return ;;
    attach:--driver-timeout) :; return ;;
    attach:--trace) :; return ;;
    attach:--metrics) :; return ;;
    attach:--ring) :; return ;;
    ps:-t|ps:--timeout) :; return ;;
    ps:--format) mapfile -t COMPREPLY < <(compgen -W 'table csv json' -- "$word"); return ;;
    ps:--columns) :; return ;;
    suspend:-t|suspend:--timeout) :; return ;;
    suspend:--path) mapfile -t COMPREPLY < <(compgen -W 'driver direct' -- "$word"); return ;;
    suspend:--watch-graphs) :; return ;;
    suspend:--group) :; return ;;
    suspend:--group-secret) :; return ;;
    suspend:--parts) :; return ;;
    suspend:--part) :; return ;;
    suspend:--driver-timeout) :; return ;;
    suspend:--trace) :; return ;;
    suspend:--metrics) :; return ;;
    suspend:--ring) :; return ;;
    resume:-d|resume:--device-map) :; return ;;
    resume:-D|resume:--images-dir) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$word"); return ;;
    resume:-t|resume:--timeout) :; return ;;
    resume:--group) :; return ;;
    resume:--group-secret) :; return ;;
    resume:--parts) :; return ;;
    resume:--part) :; return ;;
    resume:--driver-timeout) :; return ;;
    resume:--trace) :; return ;;
    resume:--metrics) :; return ;;
    resume:--ring) :; return ;;
    swap:-t|swap:--timeout) :; return ;;
    swap:--path) mapfile -t COMPREPLY < <(compgen -W 'driver direct' -- "$word"); return ;;
    swap:--watch-graphs) :; return ;;
    swap:-d|swap:--device-map) :; return ;;
    swap:--driver-timeout) :; return ;;
    swap:--trace) :; return ;;
    swap:--metrics) :; return ;;
    swap:--ring) :; return ;;
    dump:-D|dump:--images-dir) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$word"); return ;;
    dump:--sync) mapfile -t COMPREPLY < <(compgen -W 'disk none' -- "$word"); return ;;
    dump:--compress) mapfile -t COMPREPLY < <(compgen -W 'none lz4 zstd' -- "$word"); return ;;
    dump:--base) :; return ;;
    dump:-t|dump:--timeout) :; return ;;
    dump:--path) mapfile -t COMPREPLY < <(compgen -W 'driver direct' -- "$word"); return ;;
    dump:--watch-graphs) :; return ;;
    dump:--group) :; return ;;
    dump:--group-secret) :; return ;;
    dump:--parts) :; return ;;
    dump:--part) :; return ;;
    dump:--host-memory) mapfile -t COMPREPLY < <(compgen -W 'auto criu parallel' -- "$word"); return ;;
    dump:--pre-copy) mapfile -t COMPREPLY < <(compgen -W 'auto on off' -- "$word"); return ;;
    dump:--criu) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$word"); return ;;
    dump:--driver-timeout) :; return ;;
    dump:--trace) :; return ;;
    dump:--metrics) :; return ;;
    dump:--ring) :; return ;;
    dump:--ghost-limit) :; return ;;
    dump:--external) :; return ;;
    dump:--manage-cgroups) mapfile -t COMPREPLY < <(compgen -W 'ignore none props soft full strict' -- "$word"); return ;;
    dump:--network-lock) mapfile -t COMPREPLY < <(compgen -W 'iptables nftables skip' -- "$word"); return ;;
    restore:-D|restore:--images-dir) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$word"); return ;;
    restore:-d|restore:--device-map) :; return ;;
    restore:--verify) mapfile -t COMPREPLY < <(compgen -W 'first late' -- "$word"); return ;;
    restore:--inherit-fd) :; return ;;
    restore:--map-address) :; return ;;
    restore:--group) :; return ;;
    restore:--group-secret) :; return ;;
    restore:--parts) :; return ;;
    restore:--part) :; return ;;
    restore:-t|restore:--timeout) :; return ;;
    restore:--criu) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$word"); return ;;
    restore:--driver-timeout) :; return ;;
    restore:--trace) :; return ;;
    restore:--metrics) :; return ;;
    restore:--ring) :; return ;;
    restore:--external) :; return ;;
    restore:--manage-cgroups) mapfile -t COMPREPLY < <(compgen -W 'ignore none props soft full strict' -- "$word"); return ;;
    recover:-t|recover:--timeout) :; return ;;
    recover:--driver-timeout) :; return ;;
    recover:--trace) :; return ;;
    recover:--metrics) :; return ;;
    recover:--ring) :; return ;;
    doctor:-D|doctor:--images-dir) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$word"); return ;;
    doctor:--criu) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$word"); return ;;
    doctor:--driver-timeout) :; return ;;
    doctor:--trace) :; return ;;
    doctor:--metrics) :; return ;;
    inspect:-D|inspect:--images-dir) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$word"); return ;;
    inspect:-d|inspect:--device-map) :; return ;;
    inspect:--criu) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$word"); return ;;
    inspect:--driver-timeout) :; return ;;
    inspect:--trace) :; return ;;
    inspect:--metrics) :; return ;;
    verify:-D|verify:--images-dir) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$word"); return ;;
    verify:--trace) :; return ;;
    verify:--metrics) :; return ;;
    logs:-D|logs:--images-dir) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$word"); return ;;
    report:-D|report:--images-dir) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$word"); return ;;
    report:-o|report:--output) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$word"); return ;;
    report:-d|report:--device-map) :; return ;;
    report:--criu) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$word"); return ;;
    report:--driver-timeout) :; return ;;
    report:--trace) :; return ;;
    report:--metrics) :; return ;;
  esac
  case $verb in
    '') words='run attach ps suspend resume swap dump restore recover doctor explain inspect verify logs report config -h --help -V --version --json -v --verbose -q --quiet --log-json' ;;
    run) words='-h --help --name --no-io-uring --io-uring --json -v --verbose -q --quiet --log-json -D --images-dir --every --on-signal --keep --grace --whole --tcp-close --best-effort --exit-code --once --device-map --map --refresh-env --ring --group --parts --part --trace --metrics' ;;
    attach) words='-h --help -t --timeout --watch-graphs --graphs-are-safe --ignore-obstacles --json -v --verbose -q --quiet --log-json --driver-timeout --trace --metrics --ring' ;;
    ps) words='-h --help -t --timeout -w --watch --format --columns --json -v --verbose -q --quiet --log-json' ;;
    suspend) words='-h --help -t --timeout --path --attach --watch-graphs --graphs-are-safe --group --group-secret --parts --part --ignore-obstacles --json -v --verbose -q --quiet --log-json --driver-timeout --trace --metrics --ring' ;;
    resume) words='-h --help -d --device-map -D --images-dir -t --timeout --group --group-secret --parts --part --json -v --verbose -q --quiet --log-json --driver-timeout --trace --metrics --ring' ;;
    swap) words='-h --help -t --timeout --path --attach --watch-graphs --graphs-are-safe -d --device-map --ignore-obstacles --json -v --verbose -q --quiet --log-json --driver-timeout --trace --metrics --ring' ;;
    dump) words='-h --help -D --images-dir --leave-running --leave-suspended --sync --compress --direct-io --no-direct-io --base -f --force --ignore-obstacles -t --timeout --path --attach --watch-graphs --graphs-are-safe --group --group-secret --parts --part --host-memory --pre-copy --criu --json -v --verbose -q --quiet --log-json --driver-timeout --trace --metrics --ring --shell-job --tcp-established --tcp-close --file-locks --link-remap --no-link-remap --ext-unix-sk --ghost-limit --external --manage-cgroups --network-lock' ;;
    restore) words='-h --help -D --images-dir -d --device-map --verify --leave-suspended --detach --inherit-fd --map-address --group --group-secret --parts --part -t --timeout --criu --json -v --verbose -q --quiet --log-json --driver-timeout --trace --metrics --ring --external --tcp-close --ext-unix-sk --manage-cgroups' ;;
    recover) words='-h --help --all -t --timeout --json -v --verbose -q --quiet --log-json --driver-timeout --trace --metrics --ring' ;;
    doctor) words='-h --help -D --images-dir --no-trial --criu --json -v --verbose -q --quiet --log-json --driver-timeout --trace --metrics' ;;
    explain) words='-h --help --json -v --verbose -q --quiet --log-json' ;;
    inspect) words='-h --help -D --images-dir --verify -d --device-map --criu --json -v --verbose -q --quiet --log-json --driver-timeout --trace --metrics' ;;
    verify) words='-h --help -D --images-dir --json -v --verbose -q --quiet --log-json --trace --metrics' ;;
    logs) words='-h --help -D --images-dir --full --json -v --verbose -q --quiet --log-json' ;;
    report) words='-h --help -D --images-dir -o --output -f --force --verify -d --device-map --criu --json -v --verbose -q --quiet --log-json --driver-timeout --trace --metrics' ;;
    config) words='-h --help --json -v --verbose -q --quiet --log-json' ;;
  esac
  if [[ $word != -* ]]; then
    case $verb in
      attach|suspend|resume|dump|recover|doctor)
        mapfile -t COMPREPLY < <(compgen -W "$(stasis ps -q -t 200 2>/dev/null | awk 'NR > 1 { print $1 }')" -- "$word")
        return
        ;;
      dump|restore|inspect|verify|logs|report)
        compopt -o filenames
        mapfile -t COMPREPLY < <(compgen -d -- "$word")
        return
        ;;
    esac
  fi
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
}
complete -F _stasis stasis
