"""``rankzero completion bash|zsh|fish``: a script; with it the shell completes verbs, options, runs, settings."""

from __future__ import annotations

import argparse

from rankzero.errors import UserError

# Bash completes only what follows the last = or :, which it takes for the ends of words.
BASH = r"""_rankzero() {
    local line="${COMP_LINE:0:COMP_POINT}" word behind
    mapfile -t COMPREPLY < <("${COMP_WORDS[0]/#\~/$HOME}" completion --line "$line" 2>/dev/null)
    word="${line##* }"
    behind="${word##*[=:]}"
    COMPREPLY=("${COMPREPLY[@]#"${word%"$behind"}"}")
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=/] ]] && compopt -o nospace 2>/dev/null
}
complete -F _rankzero rankzero
"""
ZSH = r"""#compdef rankzero
_rankzero() {
    local -a found
    found=(${(f)"$(${words[1]} completion --line "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)"})
    compadd -S '' -- ${(M)found:#*[=/]}
    compadd -- ${found:#*[=/]}
}
compdef _rankzero rankzero
"""
FISH = r"""complete -c rankzero -f -a '(rankzero completion --line (commandline -cp) 2>/dev/null)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shell", nargs="?", choices=SCRIPTS, metavar="SHELL", help="bash, zsh or fish"
    )
    parser.add_argument(
        "--line", help="what is typed so far: print what may come next (the scripts ask this)"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.line is not None:
        from rankzero.cli.completions import candidates

        print("\n".join(candidates(arguments.line, arguments.dir)))
    elif arguments.shell is not None:
        print(SCRIPTS[arguments.shell], end="")
    else:
        raise UserError(
            "for which shell? rankzero completion bash, zsh or fish; into the shell's startup file goes "
            'eval "$(rankzero completion bash)"'
        )
    return 0
