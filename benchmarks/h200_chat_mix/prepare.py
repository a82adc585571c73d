"""Records with reasoning from GSM8K: the steps become `reasoning_content`, the number behind #### the answer.

python benchmarks/h200_chat_mix/prepare.py data/eval/gsm8k_train.jsonl.gz data/chat/gsm8k_reasoned.jsonl.gz
"""

from __future__ import annotations

import gzip
import json
import re
import sys


def converted(row: dict[str, str]) -> dict[str, object]:
    """One conversation; the calculator marks <<...>> are left out."""
    steps, number = re.sub(r"<<.*?>>", "", row["answer"]).split("\n#### ")
    answer = {"role": "assistant", "content": f"The answer is {number}.", "reasoning_content": steps}
    return {"messages": [{"role": "user", "content": row["question"]}, answer]}


if __name__ == "__main__":
    with gzip.open(sys.argv[1], "rt") as read, gzip.open(sys.argv[2], "wt") as write:
        write.writelines(json.dumps(converted(json.loads(line))) + "\n" for line in read)
