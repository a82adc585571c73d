"""Look at this machine before a run: versions, GPUs, compiler, extras, free disk, and what would be slow.

.venv/bin/python scripts/doctor.py      exit code 1 if a run would fail here
"""

from sftkit.runtime.script import script


def main() -> int:
    """Print each finding with what to do, and return 1 if one of them is a fault."""
    from sftkit.config.commands import Parser
    from sftkit.config.terminal import print_text
    from sftkit.launch.doctor import findings

    Parser(__doc__).parse_args()
    states = []
    for finding in findings():
        states.append(finding.state)
        level = {"fault": "error", "slow": "warning"}.get(finding.state)
        print_text(str(finding), level=level)  # type: ignore[arg-type]
    counts = {word: states.count(word) for word in ("fault", "slow", "note")}
    print_text(f"\nfaults {counts['fault']}, slow {counts['slow']}, notes {counts['note']}")
    return 1 if "fault" in states else 0


if __name__ == "__main__":
    script(main)
