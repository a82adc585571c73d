"""The batch script that starts a recipe on several machines of a Slurm cluster: `sftkit launch --slurm N`. No torch."""

import shlex
from functools import partial
from string import Template

from sftkit.config import commands, load, schema, tables, terminal
from sftkit.config.topology import Topology
from sftkit.errors import ConfigError
from sftkit.preflight.inputs import launch_rules, named_stage
from sftkit.runtime.launcher import signal_env

SLURM_USAGE = rf"""usage: sftkit launch --slurm N [--gpus G] {{{"|".join(tables.STAGE_SCRIPTS)}}} RECIPE [key=value ...]

Prints a batch script for Slurm that trains RECIPE on N machines of G GPUs each (8; 0: a CPU process each):
  sftkit launch --slurm 2 sft recipes/qwen3_0_6b/sft.yaml run.dir=/shared/runs/sft \
      train.global_batch_size=16 > sft.sh && sbatch sft.sh
run.dir must be on a file system that all machines share (docs/multi_node.md). Options of sbatch override those in
the script: sbatch --time=2:00:00 --partition=gpu sft.sh"""
_SECONDS = 300
"How long before the time limit Slurm signals the launchers."
_PORT = 29500
_CPUS = "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # since Slurm 22.05 srun does not take it from the job\n"
_SCRIPT = Template(r"""#!/bin/bash
#SBATCH --job-name=$name
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=1
$gpu_lines#SBATCH --exclusive
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@$seconds
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=$name-%j.log

RUN_DIR=$run_dir
WORDS=($words)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$patience $signals$environment
${cpus}export HEAD=$$(scontrol show hostnames "$$SLURM_JOB_NODELIST" | head -n 1)
trap true TERM # this script outlives the launchers, to queue the job again
begun=$$(date +%s)

srun --kill-on-bad-exit=0 bash -c 'exec $accelerate launch --config_file $config \
    --num_machines $$SLURM_NNODES --num_processes $$((SLURM_NNODES * $each)) --machine_rank $$SLURM_NODEID \
    --main_process_ip $$HEAD --main_process_port $port$replicas \
    $script "$$@"' launcher "$${WORDS[@]}"
code=$$?

read_status='import json, sys
of = json.load(open(sys.argv[1]))
print(of["status"] if of["time"] >= int(sys.argv[2]) else "unchanged")'
status=unchanged
test -e "$$RUN_DIR/run_status.json" && status=$$(python3 -c "$$read_status" "$$RUN_DIR/run_status.json" "$$begun")
echo "launchers ended with $$code, run: $$status"
case $$status in
    preempted) scontrol requeue "$$SLURM_JOB_ID" ;;
    finished | stopped) exit 0 ;;
    *) exit 1 ;;
esac
""")


def batch_script(stage: str, recipe: str, overrides: list[str], nodes: int, gpus: int) -> str:
    """Return the batch script of a recipe.

    Args:
        stage: a name of tables.STAGE_SCRIPTS.
        nodes: machines.
        gpus: of each machine; 0: a CPU process on each.

    Raises:
        ConfigError: the recipe is wrong, or cannot run on these processes.
    """
    each = max(gpus, 1)
    processes = nodes * each
    cfg = load.read_config(recipe, overrides, lambda _: Topology(replicas=processes, on_cpu=not gpus))
    if cfg.train.engine == "pipeline":
        config = "pp"
        stages = schema.num_stages(cfg.train) or processes
        if processes % stages:
            raise ConfigError(f"train.pipeline_stages={stages} does not divide {processes} processes")
        topology = Topology(stages=stages, replicas=processes // stages, on_cpu=not gpus)
    elif cfg.adapter is not None and cfg.adapter.base == "nf4":  # is not sharded
        config = "ddp"
        topology = Topology(replicas=processes, on_cpu=not gpus)
    else:
        config = "multi_node"
        topology = Topology(replicas=nodes, shards=each, sharded=True, on_cpu=not gpus)
    # Again, as now the processes are known.
    load.read_config(recipe, overrides, lambda _: topology, [partial(named_stage, stage=stage), *launch_rules()])
    words = [recipe, *(word for word in overrides if not word.startswith("train.resume=")), "train.resume=auto"]
    [(variable, names)] = signal_env({}).items()
    script = f"scripts/{tables.STAGE_SCRIPTS[stage]}"
    return _SCRIPT.substitute(
        name=stage,
        nodes=nodes,
        gpu_lines=f"#SBATCH --gpus-per-node={gpus}\n#SBATCH --cpus-per-task={8 * gpus}\n" if gpus else "",
        cpus=_CPUS if gpus else "",
        seconds=_SECONDS,
        run_dir=shlex.quote(cfg.run.dir),
        words=shlex.join(words),
        patience=_SECONDS - 20,  # of a launcher with its ranks: what Slurm leaves, but for its own end
        signals=f"{variable}={names}",
        environment="" if gpus else " ACCELERATE_USE_CPU=true",
        accelerate=commands.program_path("accelerate"),
        config=commands.shipped(f"accelerate_configs/{config}.yaml"),
        each=each,
        port=_PORT,
        replicas=" --parallelism_config_dp_replicate_size $SLURM_NNODES" if config == "multi_node" else "",
        script=commands.shipped(script),
    )


def print_script(words: list[str]) -> None:
    """Print the script that the words of `sftkit launch` ask for. Exits with code 2 if they are wrong."""
    if words in (["-h"], ["--help"]):
        terminal.print_text(SLURM_USAGE)
        return
    numbers = {"--gpus": 8}
    while words and words[0] in ("--slurm", "--gpus"):
        least = 0 if words[0] == "--gpus" else 1
        if len(words) < 2 or not words[1].isdecimal() or int(words[1]) < least:
            load.fail(f"{words[0]}: how many? Take {least} or more\n\n{SLURM_USAGE}")
        numbers[words[0]] = int(words[1])
        words = words[2:]
    if words and words[0].startswith("-"):
        load.fail(f"{words[0]}: no such option. Options of Slurm are for sbatch\n\n{SLURM_USAGE}")
    if words and words[0] not in tables.STAGE_SCRIPTS:
        load.fail(f"{words[0]}: which stage? Take {', '.join(tables.STAGE_SCRIPTS)}, then the recipe\n\n{SLURM_USAGE}")
    if "--slurm" not in numbers or len(words) < 2 or words[0] not in tables.STAGE_SCRIPTS or "=" in words[1]:
        load.fail(SLURM_USAGE)
    stage, recipe, *overrides = words
    try:
        text = batch_script(stage, recipe, overrides, numbers["--slurm"], numbers["--gpus"])
    except ConfigError as error:
        load.fail(f"\nerror: {error}")
    terminal.print_text(text, end="")
