"""Build the wandb workspace of a project. Needs the extra `dashboard`.

.venv/bin/python scripts/make_dashboard.py --entity me --project sftkit
.venv/bin/python scripts/make_dashboard.py --entity me --project sftkit --dry-run

It opens with speed, loss, evaluation and what must be zero; every other metric that is logged gets a panel too.
"""

import json

from sftkit.runtime.script import script


def main() -> None:
    """Make the workspace of a project on wandb."""
    from sftkit.config.commands import Parser
    from sftkit.config.terminal import print_text

    parser = Parser(__doc__)
    parser.add_argument("--entity", required=True, help="user or team on wandb")
    parser.add_argument("--project", default="sftkit", help="project of the runs, log.project of the recipe")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the request without sending it; no key, no network"
    )
    args = parser.parse_args()

    from sftkit.tracking.dashboard import panels

    view = panels.workspace(args.entity, args.project)
    print_text(json.dumps(panels.spec(view), indent=1) if args.dry_run else panels.save_view(view))


if __name__ == "__main__":
    script(main)
