"""Makes man pages and completions of what `stasis describe-command-line` prints (standard input).

    manual_pages.py DIR

Writes DIR/man/stasis.1, DIR/man/stasis-VERB.1 and DIR/completions/stasis.bash, _stasis, stasis.fish.
"""

import json
import os
import re
import sys

SEE = {"dump": ["restore", "doctor", "inspect", "logs"], "restore": ["dump", "inspect", "logs"],
       "suspend": ["resume", "recover"], "resume": ["suspend", "recover"], "recover": ["ps"],
       "ps": ["recover", "doctor"], "doctor": ["dump"], "explain": ["logs"], "inspect": ["restore", "logs", "report"],
       "report": ["inspect", "logs"],
       "logs": ["explain", "inspect"], "config": ["doctor"]}
# What a page says besides the options.
BODIES = {"ps": """.PP
PID, USER and COMMAND are those of the process. STATE is its CUDA state (running, locked, suspended,
which is checkpointed in csv and JSON, failed), waiting if the driver lets it run while its GPU memory is away, with a note that says until when, or
busy if it does not answer in time, stopped (Ctrl\\-Z), traced, or ? with a note that says why.
PATH is by whom its GPU memory goes, or has gone: direct where the agent of `stasis run` takes it out, driver,
or \\- if that cannot be seen. GPUS are their numbers in the driver's order. GPU MEMORY in parentheses is what a suspended process gets
back. SINCE is how long ago Stasis suspended it, or, for one that is not suspended, it was started; \\- if
another tool has suspended it. OPERATION is what is under way, with the process that does it, or what was cut
short: `stasis recover` mends that.
.PP
On a terminal that is too narrow columns are left out, first those that say nothing, never NAME; \\-\\-columns
names them, and \\-\\-format csv gives all of them.
.PP
With \\-\\-watch it goes on until it is ended (Ctrl\\-C). With \\-\\-json that gives one object a line.
""", "doctor": """.PP
The first three lines are the verdict: whether a suspend, a dump, and a restore on this machine are possible, as
far as that can be known beforehand, and if not, why. Then comes what is red (it will fail), then yellow (it
works, with a limit); green, what is fine, only with \\-v.
""", "config": """.PP
Defaults come from /etc/stasis/config, and from ~/.config/stasis/config ($XDG_CONFIG_HOME/stasis/config), which
is stronger; variables of the environment are stronger than both, and the command line is strongest. The files
are TOML: a key is the long name of an option, a section the name of a verb, and a key above all sections holds
for every verb that has the option. A file that another user than root and the caller owns or can write, or a
folder or link on the way to it, is not read. STASIS_CONFIG names a file in place of both; empty: none.
"""}
FOLDERS = {"--images-dir"}
FILES = {"--criu", "--output"}


def roff(text):
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^(['.])", r"\\&\1", text, flags=re.M)


def choices(option):
    return option.get("choices", [])


def value_of(option):
    if not option["value"] and "choices" not in option:
        return ""
    value = "|".join(choices(option)) or option["value"]
    return f"[{value}]" if option["optional_value"] else value


def options_of(command):
    """Those with names, the ones of a group of their own last."""
    named = [o for o in command["options"] if o["names"]]
    return sorted(named, key=lambda o: o["group"] != "Options")


def synopsis(command, name):
    words = [f".B {roff(name)}", ".RI [ OPTION \\|.\\|.\\|. ]"]
    if "verbs" in command:
        return "\n".join(words + [".I VERB", ".RI [ ARGUMENT \\|.\\|.\\|. ]"])
    words += [f".BI {roff(o['names'][0])} \" {roff(value_of(o))}\""
              for o in options_of(command) if o["required"] and "positional" not in o]
    for option in command["options"]:
        if "positional" in option:
            shown = option["positional"].upper()
            shown = f"{shown}\\|.\\|.\\|." if option["many"] else shown
            words.append(f".I {shown}" if option["required"] else f".RI [ {shown} ]")
    return "\n".join(words)


def option_text(option):
    names = ", ".join(f"\\fB{roff(name)}\\fR" for name in option["names"])
    value = value_of(option)
    text = option["text"] + (" (required)" if option["required"] and "positional" not in option else "")
    text = f"the same as {option['positional'].upper()}" if "positional" in option else text
    return f".TP\n{names}" + (f" \\fI{roff(value)}\\fR" if value else "") + f"\n{roff(text)}\n"


def page(known, command, name, body=""):
    summary = command["text"].split(";")[0].split(":")[0].rstrip(".").removeprefix("Stasis ")
    statuses, environment = known["footer"].split("STASIS_LIBCUDA", 1)
    out = [f'.TH {roff(name).upper()} 1 "" "Stasis {known["version"]}" "Stasis"',
           f".SH NAME\n{roff(name)} \\- {roff(summary)}",
           f".SH SYNOPSIS\n{synopsis(command, name.replace('-', ' ', 1))}",
           f".SH DESCRIPTION\n{roff(command['text'][0].upper() + command['text'][1:].rstrip('.'))}.", body.rstrip("\n")]
    positional = [o for o in command["options"] if "positional" in o]
    if positional:
        out.append(".SH ARGUMENTS")
        out += [f".TP\n\\fI{roff(o['positional'].upper())}\\fR\n{roff(o['text'])}" for o in positional]
    group = ""
    for option in options_of(command):
        if option["group"] != group:
            group = option["group"]
            out.append(f".SH {group.upper()}")
        out.append(option_text(option).rstrip("\n"))
    if command["examples"]:
        out.append(".SH EXAMPLES")
        out += [f".TP\n.B {roff(one['command'])}\n{roff(one['text'])}" for one in command["examples"]]
    statuses = statuses.split("Exit status: ", 1)[1].strip()
    out.append(f".SH EXIT STATUS\n{roff(statuses)}\n`stasis explain` lists the codes of all errors.")
    out.append(".SH ENVIRONMENT\n" + roff("STASIS_LIBCUDA" + environment.rstrip(".") + ".\nSTASIS_STATE_DIR is where "
               "records of operations are kept. NO_COLOR turns colours off."))
    others = [f"stasis-{verb}" for verb in SEE.get(command["name"], [])] or [f"stasis-{v['name']}" for v in known["verbs"]]
    if command["name"] != "stasis":
        others.insert(0, "stasis")
    pages = [(other, 1) for other in others]
    if command["name"] in ("stasis", "dump", "restore", "inspect", "logs"):
        pages.append(("stasis-image", 5))
    if command["name"] == "stasis":
        pages.append(("cuda-checkpoint", 1))
    out.append(".SH SEE ALSO\n" + ",\n".join(f".BR {roff(name)} ({section})" for name, section in pages))
    return "\n".join(part for part in out if part) + "\n"


def main_page(known):
    body = ".SH VERBS\n" + "\n".join(
        f".TP\n.BR stasis\\-{roff(v['name'])} (1)\n{roff(v['text'])}" for v in known["verbs"])
    return page(known, known, "stasis", body)


def words_of(command):
    return [name for option in options_of(command) for name in option["names"]]


def valued(command):
    for option in options_of(command):
        if option["value"] or "choices" in option:
            yield option


def bash(known):
    cases, values = [], []
    for verb in known["verbs"]:
        cases.append(f"    {verb['name']}) words='{' '.join(words_of(verb))}' ;;")
        for option in valued(verb):
            names = "|".join(f"{verb['name']}:{name}" for name in option["names"])
            if FOLDERS & set(option["names"]):
                action = "compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- \"$word\")"
            elif FILES & set(option["names"]):
                action = "compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- \"$word\")"
            elif choices(option):
                action = f"mapfile -t COMPREPLY < <(compgen -W '{' '.join(choices(option))}' -- \"$word\")"
            elif option["optional_value"]:
                continue
            else:
                action = ":"
            values.append(f"    {names}) {action}; return ;;")
    pids = "|".join(v["name"] for v in known["verbs"] if any(o.get("positional", "").upper() == "PID" for o in v["options"]))
    folders = "|".join(v["name"] for v in known["verbs"] if any(o.get("positional", "").upper() == "DIR" for o in v["options"]))
    return f"""# Completion of stasis for bash. Made by tools/manual-pages.
_stasis() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} verb='' words='' i
  COMPREPLY=()
  # "--sync=d" comes in three words.
  if [[ $word == '=' ]]; then
    word=''
  elif [[ $before == '=' ]]; then
    before=${{COMP_WORDS[COMP_CWORD - 2]}}
  fi
  for ((i = 1; i < COMP_CWORD; ++i)); do
    [[ ${{COMP_WORDS[i]}} == -* ]] || {{ verb=${{COMP_WORDS[i]}} && break; }}
  done
  case $verb:$before in
{chr(10).join(values)}
  esac
  case $verb in
    '') words='{' '.join([v['name'] for v in known['verbs']] + words_of(known))}' ;;
{chr(10).join(cases)}
  esac
  if [[ $word != -* ]]; then
    case $verb in
      {pids})
        mapfile -t COMPREPLY < <(compgen -W "$(stasis ps -q -t 200 2>/dev/null | awk 'NR > 1 {{ print $1 }}')" -- "$word")
        return
        ;;
      {folders})
        compopt -o filenames
        mapfile -t COMPREPLY < <(compgen -d -- "$word")
        return
        ;;
    esac
  fi
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
}}
complete -F _stasis stasis
"""


def quoted(text):
    return "'" + text.replace("'", "'\\''") + "'"


def zsh(known):
    def spec(option):
        text = re.sub(r"[\[\]:]", " ", option["text"].split(";")[0])
        action = ""
        if option["value"] or "choices" in option:
            if FOLDERS & set(option["names"]):
                kind = "_files -/"
            elif FILES & set(option["names"]):
                kind = "_files"
            else:
                kind = f"({' '.join(choices(option))})" if choices(option) else " "
            action = f":{re.sub(r'[^A-Za-z]', ' ', option['value']).strip() or 'value'}:{kind}"
            action = ":" + action if option["optional_value"] else action
        repeat = "*" if option["many"] else f"({' '.join(option['names'])})"
        equals = "=" if action and not option["optional_value"] else ""
        return [quoted(f"{repeat}{name}{equals if name.startswith('--') else ''}[{text}]{action}")
                for name in option["names"]]

    cases = []
    for verb in known["verbs"]:
        specs = [one for option in options_of(verb) for one in spec(option)]
        for option in verb["options"]:
            kind = option.get("positional", "").upper()
            if kind == "PID":
                specs.append("'1:process:_stasis_pids'")
            elif kind == "DIR":
                specs.append("'1:image:_files -/'")
            elif kind:
                specs.append("'*:what: '")
        cases.append(f"    {verb['name']})\n      _arguments " + " \\\n        ".join(specs) + "\n      ;;")
    verbs = " \\\n    ".join(quoted(f"{v['name']}:{v['text'].split(';')[0]}") for v in known["verbs"])
    return f"""#compdef stasis
# Completion of stasis for zsh. Made by tools/manual-pages.
_stasis_pids() {{
  local -a pids
  pids=(${{(f)"$(stasis ps -q -t 200 2>/dev/null |
    awk 'NR == 1 {{ at = index($0, "COMMAND") }} NR > 1 {{ print $1 ":" substr($0, at) }}')"}})
  _describe process pids
}}
_stasis() {{
  local context state state_descr line
  local -A opt_args
  local -a verbs
  verbs=({verbs})
  _arguments -C {' '.join(one for option in options_of(known) for one in spec(option))} \
    '1: :->verb' '*:: :->rest'
  case $state in
    verb)
      _describe verb verbs
      return
      ;;
    rest) ;;
    *) return ;;
  esac
  case $line[1] in
{chr(10).join(cases)}
  esac
}}
_stasis "$@"
"""


def fish(known):
    def quote(text):
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = ["# Completion of stasis for fish. Made by tools/manual-pages.",
             "# Is this the verb of the command line? Without an argument: has it none yet?",
             "function __stasis_verb",
             "    set -l words (commandline -opc)",
             "    for word in $words[2..]",
             "        string match -q -- '-*' $word; and continue",
             "        test \"$word\" = \"$argv\"",
             "        return",
             "    end",
             "    test -z \"$argv\"",
             "end",
             "complete -c stasis -f"]
    for option in options_of(known):
        words = [f"-s {n[1:]}" if not n.startswith("--") else f"-l {n[2:]}" for n in option["names"]]
        lines.append(f"complete -c stasis -n __stasis_verb {' '.join(words)} -d {quote(option['text'])}")
    for verb in known["verbs"]:
        lines.append(f"complete -c stasis -n __stasis_verb -a {verb['name']} -d {quote(verb['text'].split(';')[0])}")
        seen = f"-n '__stasis_verb {verb['name']}'"
        for option in options_of(verb):
            words = [f"-s {n[1:]}" if not n.startswith("--") else f"-l {n[2:]}" for n in option["names"]]
            if (option["value"] or "choices" in option) and not option["optional_value"]:
                words.append("-r" if FILES & set(option["names"]) else "-x")
                if FOLDERS & set(option["names"]):
                    words.append("-a '(__fish_complete_directories)'")
                elif FILES & set(option["names"]):
                    words.append("-F")
                elif choices(option):
                    words.append(f"-a {quote(' '.join(choices(option)))}")
            lines.append(f"complete -c stasis {seen} {' '.join(words)} -d {quote(option['text'].split(';')[0])}")
        for option in verb["options"]:
            kind = option.get("positional", "").upper()
            if kind == "PID":
                lines.append(f"complete -c stasis {seen} -a \"(stasis ps -q -t 200 2>/dev/null | awk 'NR > 1 {{ print \\$1 }}')\"")
            elif kind == "DIR":
                lines.append(f"complete -c stasis {seen} -a '(__fish_complete_directories)'")
    return "\n".join(lines) + "\n"


def main():
    folder = sys.argv[1]
    known = json.load(sys.stdin)
    man, completions = os.path.join(folder, "man"), os.path.join(folder, "completions")
    for path in (man, completions):
        os.makedirs(path, exist_ok=True)
    files = {os.path.join(man, "stasis.1"): main_page(known),
             os.path.join(completions, "stasis.bash"): bash(known),
             os.path.join(completions, "_stasis"): zsh(known),
             os.path.join(completions, "stasis.fish"): fish(known)}
    for verb in known["verbs"]:
        files[os.path.join(man, f"stasis-{verb['name']}.1")] = page(known, verb, f"stasis-{verb['name']}",
                                                                          BODIES.get(verb["name"], ""))
    for path, text in files.items():
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    main()
