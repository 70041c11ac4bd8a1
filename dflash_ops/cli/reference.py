"""`python -m dflash_ops.cli.reference`: docs/cli.md and docs/schemas/all.schema.json, made from the commands.

The rule here: the text comes from our own declarations (names, metavars, defaults, help), never from a library's layout
of them, so that it is the same with every version of typer and click. Each command has one example, in EXAMPLES.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dflash_ops.cli.examples import EXAMPLES
from dflash_ops.cli.main import COMMANDS, load_command
from dflash_ops.cli.schemas import NAME, whole
from dflash_ops.errors import EXIT_CODES

HEAD = """# Commands

Made from the commands themselves by `make docs`; a test holds it to them. `dflash-ops COMMAND --help` says the same.

`dflash-ops --version` prints the version; `--debug`, anywhere in a line, shows the traceback of an error.
`dflash-ops --install-completion` teaches your shell (bash, zsh, fish, PowerShell) to complete commands, options, jobs,
hosts, workers, releases and kinds; `--show-completion` prints the script instead.
"""


def text() -> str:
    """docs/cli.md."""
    out = [HEAD, "## Exit codes", "", "| code | means |", "|---|---|"]
    out += [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()]
    out += [
        "",
        "A command for several jobs exits with the largest of their codes. The trainer's own: docs/contracts.md.",
        "",
    ]
    for name, entry in COMMANDS.items():
        made = load_command(name, entry)
        below = getattr(made, "commands", None)
        out += [f"## {name}", ""]
        if below is None:
            out += _one(name, made)
            continue
        out += [_prose(made.help or entry.help), ""]
        for inner, command in below.items():
            out += [f"### {name} {inner}", "", *_one(f"{name} {inner}", command)]
    return "\n".join(out).rstrip() + "\n"


def _one(name: str, command: Any) -> Iterator[str]:
    """One command: use, what it does, its options, an example."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden and "--help" not in p.opts]
    words = " ".join(["dflash-ops", name, *(["[OPTIONS]"] if options else []), *(_word(a) for a in arguments)])
    yield from (f"`{words}`", "", _prose(command.help or ""), "")
    rows = [(_word(a), a.help or "", "") for a in arguments] + [(_names(o), o.help or "", _default(o)) for o in options]
    if rows:
        yield from ("| | | default |", "|---|---|---|")
        for left, says, default in rows:
            yield f"| `{_cell(left)}` | {_cell(says)} | {_cell(default)} |"
        yield ""
    yield from ("```sh", EXAMPLES.get(name, f"dflash-ops {name}"), "```", "")


def _word(argument: Any) -> str:
    """`JOB`, `[JOB]...`: the metavar as we wrote it."""
    said = argument.metavar or argument.name.upper()
    return said if argument.required or said.startswith("[") else f"[{said}]"


def _names(option: Any) -> str:
    """`--lines, -n N`, `--gate / --no-gate`."""
    names = ", ".join(sorted(option.opts, key=lambda word: (not word.startswith("--"), word)))
    if option.secondary_opts:
        return f"{names} / {', '.join(option.secondary_opts)}"
    return names if option.is_flag else f"{names} {option.metavar or option.name.upper()}"


def _default(option: Any) -> str:
    value = option.default
    if value is None or value is False or value in ("", [], ()):
        return "required" if option.required else ""
    return option.opts[0] if value is True else str(value)


def _prose(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def outputs(root: Path) -> dict[Path, str]:
    """Each file below the checkout `root`, and what it should hold."""
    return {root / "docs/cli.md": text(), root / f"docs/schemas/{NAME}": whole(root / "docs/schemas")}


def main(argv: Sequence[str]) -> int:
    """`[--check] [ROOT]`: write the files, or say which are not as they should be (exit code 1)."""
    check = "--check" in argv
    words = [word for word in argv if word != "--check"]
    root = Path(words[0]) if words else Path(__file__).resolve().parents[2]
    old = [path for path, content in outputs(root).items() if not path.exists() or path.read_text("utf-8") != content]
    for path in old:
        if check:
            print(f"{path.relative_to(root)} is not up to date: make docs", file=sys.stderr)
        else:
            path.write_text(outputs(root)[path], "utf-8")
            print(f"wrote {path.relative_to(root)}")
    return 1 if check and old else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
