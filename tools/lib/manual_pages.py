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
       "ps": ["recover", "doctor"], "doctor": ["dump"], "explain": ["logs"], "inspect": ["restore", "logs"],
       "logs": ["explain", "inspect"]}
FOLDERS = {"--images-dir"}
PROGRAMS = {"--criu"}


def roff(text):
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^(['.])", r"\\&\1", text, flags=re.M)


def choices(option):
    return option["choices"].strip("{}").split(",") if "choices" in option else []


def value_of(option):
    if not option["value"] and "choices" not in option:
        return ""
    value = option["value"] or "|".join(choices(option))
    return f"[{value}]" if option["optional_value"] else value


def options_of(command):
    """Named ones first those with a group of their own last."""
    named = [o for o in command["options"] if o["names"]]
    return sorted(named, key=lambda o: o["group"] != "Options")


def synopsis(command, name):
    words = [f".B {roff(name)}", ".RI [ OPTION \\|.\\|.\\|. ]"]
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
    text += f"; one of {', '.join(choices(option))}" if choices(option) else ""
    return f".TP\n{names}" + (f" \\fI{roff(value)}\\fR" if value else "") + f"\n{roff(text)}\n"


def page(known, command, name, body=""):
    summary = command["text"].split(";")[0].split(":")[0].rstrip(".")
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
    out.append(f".SH EXIT STATUS AND ENVIRONMENT\n{roff(known['footer'])}\n.PP\n"
               + roff("STASIS_STATE_DIR is where records of operations are kept. "
                      "`stasis explain` lists the codes of all errors."))
    others = [f"stasis-{verb}" for verb in SEE.get(command["name"], [])] or [f"stasis-{v['name']}" for v in known["verbs"]]
    if command["name"] != "stasis":
        others.insert(0, "stasis")
    out.append(".SH SEE ALSO\n" + ",\n".join(f".BR {roff(other)} (1)".replace("(1)", "(1)") for other in others))
    return "\n".join(part for part in out if part).replace(",\n.BR", " ,\n.BR") + "\n"


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
            elif PROGRAMS & set(option["names"]):
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
        mapfile -t COMPREPLY < <(compgen -W "$(stasis ps -q 2>/dev/null | awk 'NR > 1 {{ print $1 }}')" -- "$word")
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
            elif PROGRAMS & set(option["names"]):
                kind = "_files"
            else:
                kind = f"({' '.join(choices(option))})" if choices(option) else " "
            action = f":{re.sub(r'[^A-Za-z]', ' ', option['value']).strip() or 'value'}:{kind}"
            action = ":" + action if option["optional_value"] else action
        repeat = "*" if option["many"] else f"({' '.join(option['names'])})"
        return [quoted(f"{repeat}{name}[{text}]{action}") for name in option["names"]]

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
  pids=(${{(f)"$(stasis ps -q 2>/dev/null | awk 'NR > 1 {{ print $1 ":" $NF }}')"}})
  _describe process pids
}}
_stasis() {{
  local -a verbs
  verbs=({verbs})
  if ((CURRENT == 2)); then
    _describe verb verbs
    return
  fi
  local verb=$words[2]
  shift words
  ((CURRENT--))
  case $verb in
{chr(10).join(cases)}
  esac
}}
_stasis "$@"
"""


def fish(known):
    def quote(text):
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = ["# Completion of stasis for fish. Made by tools/manual-pages.", "complete -c stasis -f"]
    for verb in known["verbs"]:
        lines.append(f"complete -c stasis -n __fish_use_subcommand -a {verb['name']} -d {quote(verb['text'].split(';')[0])}")
        seen = f"-n '__fish_seen_subcommand_from {verb['name']}'"
        for option in options_of(verb):
            words = [f"-s {n[1:]}" if not n.startswith("--") else f"-l {n[2:]}" for n in option["names"]]
            if (option["value"] or "choices" in option) and not option["optional_value"]:
                words.append("-r")
                if FOLDERS & set(option["names"]):
                    words.append("-a '(__fish_complete_directories)'")
                elif PROGRAMS & set(option["names"]):
                    words.append("-F")
                elif choices(option):
                    words.append(f"-a {quote(' '.join(choices(option)))}")
            lines.append(f"complete -c stasis {seen} {' '.join(words)} -d {quote(option['text'].split(';')[0])}")
        for option in verb["options"]:
            kind = option.get("positional", "").upper()
            if kind == "PID":
                lines.append(f"complete -c stasis {seen} -a \"(stasis ps -q 2>/dev/null | awk 'NR > 1 {{ print \\$1 }}')\"")
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
        files[os.path.join(man, f"stasis-{verb['name']}.1")] = page(known, verb, f"stasis-{verb['name']}")
    for path, text in files.items():
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    main()
