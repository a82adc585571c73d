"""Build the wandb workspace of a project, and a report that compares runs of it. Needs .venv/bin/python -m pip install 'sftkit[dashboard]'.

.venv/bin/python scripts/make_dashboard.py --entity me --project sftkit
.venv/bin/python scripts/make_dashboard.py --entity me --project sftkit --report default-sft qwen3_0_6b-sft
.venv/bin/python scripts/make_dashboard.py --entity me --project sftkit --dry-run
"""

import json

from sftkit.runtime.script import script


def main() -> None:
    from sftkit.config.command_line import Parser
    from sftkit.config.terminal import say

    parser = Parser(__doc__)
    parser.add_argument("--entity", required=True, help="user or team on wandb")
    parser.add_argument("--project", default="sftkit", help="project of the runs, log.project of the recipe")
    parser.add_argument("--report", nargs=2, metavar=("RUN_A", "RUN_B"), help="compare two runs, by id or name")
    parser.add_argument("--dry-run", action="store_true", help="print what would be sent; no key, no network")
    args = parser.parse_args()

    from sftkit.tracking import workspace as dashboard

    views = {"workspace": dashboard.workspace(args.entity, args.project)}
    if args.report:
        views["report"] = dashboard.comparison(args.entity, args.project, args.report)
    if args.dry_run:
        say(json.dumps({name: dashboard.spec(view) for name, view in views.items()}, indent=1))
        return
    for name, view in views.items():
        say(f"{name}: {dashboard.save(view)}")


if __name__ == "__main__":
    script(main)
