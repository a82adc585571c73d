"""Build the wandb workspace of a project, and a report that compares two runs of it. Needs the extra `dashboard`.

.venv/bin/python scripts/make_dashboard.py --entity me --project sftkit
.venv/bin/python scripts/make_dashboard.py --entity me --project sftkit --report runs/a/sft runs/b/sft
.venv/bin/python scripts/make_dashboard.py --entity me --project sftkit --dry-run

Each metric that the newest run on wandb under runs/ logged gets a panel; --run names another run.
"""

import json

from sftkit.runtime.script import script


def main() -> None:
    """Make the workspace of a project on wandb."""
    from sftkit.config.commands import Parser, path
    from sftkit.config.terminal import print_text

    parser = Parser(__doc__)
    parser.add_argument("--entity", required=True, help="user or team on wandb")
    parser.add_argument("--project", default="sftkit", help="project of the runs, log.project of the recipe")
    parser.add_argument(
        "--run", type=path, help="run directory whose metrics get panels; default: the newest under runs/"
    )
    parser.add_argument(
        "--report", nargs=2, metavar=("RUN_A", "RUN_B"), help="compare two runs: directories, ids or names"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the request without sending it; no key, no network"
    )
    args = parser.parse_args()

    from sftkit.tracking.dashboard import panels

    names = panels.names_of(args.run)
    views = {"workspace": panels.workspace(args.entity, args.project, names)}
    if args.report:
        first, second = (panels.find_run(run, args.entity, args.project, offline=args.dry_run) for run in args.report)
        views["report"] = panels.comparison(args.entity, args.project, (first, second), names)
    if args.dry_run:
        print_text(json.dumps({name: panels.spec(view) for name, view in views.items()}, indent=1))
        return
    for name, view in views.items():
        print_text(f"{name}: {panels.save_view(view)}")


if __name__ == "__main__":
    script(main)
