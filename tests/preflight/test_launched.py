"""What an engine cannot do on the processes of a launch is refused before anything is loaded, in the engine's words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sftkit.config.load import read_config
from sftkit.config.topology import Topology, read_topology, topology_of
from sftkit.errors import ConfigError
from sftkit.preflight import inputs
from sftkit.preflight.inputs import launch_rules

ROOT = Path(__file__).parents[2]
RECIPE = """
run: {dir: runs/x}
model: {scratch: {model_type: llama, num_hidden_layers: 6}, train_tokenizer: {}}
data: {train: [{path: 'builtin:docs'}], max_length: 64}
train: {max_steps: 1, global_batch_size: 8, micro_batch_size: 1}
"""
STAGES, REPLICAS, SHARDS = Topology(stages=2), Topology(replicas=2), Topology(shards=2, sharded=True)
TENSOR, CONTEXT, ON_CPU = Topology(tensor=2, sharded=True), Topology(context=2, sharded=True), Topology(on_cpu=True)
PIPELINE, GRAPH = "train.engine=pipeline", "train.engine=graph"
CUDA_GRAPHS = "graph.passes=[cuda_graphs]"
NF4 = ("adapter.base=nf4",)
INTERLEAVED = "train.pipeline_schedule=interleaved"


@pytest.fixture(autouse=True)
def _recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)


def problem(topology: Topology, *words: str, here: bool = False) -> str:
    """What is refused on these processes; empty: nothing."""
    try:
        read_config("recipe.yaml", words, lambda _: topology, launch_rules(here=here))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("topology", "words", "message"),
    [
        (STAGES, (PIPELINE, "train.pipeline_layers=[3,2]"), "=[3, 2]: must be 2 numbers that add up to the 6 layers"),
        (STAGES, (PIPELINE, "train.pipeline_layers=[2,2,2]"), "=[2, 2, 2]: must be 2 numbers that add up"),
        (STAGES, (PIPELINE, INTERLEAVED, "model.scratch.num_hidden_layers=3"), "4 stages for the 3 layers"),
        (STAGES, (PIPELINE, "model.scratch.model_type=gemma2"), "gemma2 cannot be split into stages here, llama, "),
        (REPLICAS, (GRAPH,), "train.engine=graph shards weights over its 2 processes, and ddp keeps them whole"),
        (CONTEXT, (GRAPH,), "train.engine=graph has no context parallelism yet"),
        (ON_CPU, (GRAPH, CUDA_GRAPHS), "graph.passes: cuda_graphs needs a GPU, and this process computes on cpu"),
        (
            ON_CPU,
            (GRAPH, "graph.passes=[full_inductor]", "attention.backend=flex"),
            "no backward pass of FlexAttention",
        ),
        (
            SHARDS,
            NF4,
            "adapter.base: nf4 does not go with shards (fsdp2, 2 shards): start with ddp.yaml, where each GPU ",
        ),
        (ON_CPU, NF4, "adapter.base: nf4 needs a GPU, and this run computes on the CPU: set adapter.base=bf16 here"),
        (REPLICAS, (*NF4, "train.fp8=rowwise"), "train.fp8: does not go with adapter"),
    ],
)
def test_what_the_engine_would_refuse_after_loading_is_refused_at_once(
    topology: Topology, words: tuple[str, ...], message: str
) -> None:
    found = problem(topology, *words)
    assert message in found
    assert found.startswith(("command line: train.", "command line: graph.", "command line: adapter.")), (
        "it names the setting and where it is"
    )


HEADS = "model.scratch={model_type: llama, num_attention_heads: 3, num_key_value_heads: 2, intermediate_size: 96}"
MIXED = "model.scratch={model_type: lfm2, layer_types: [conv, full_attention]}"
FP8, PLAIN = "train.fp8=rowwise", ("train.engine=reference", "train.precision=fp32", "compile.enabled=false")


@pytest.mark.parametrize(
    ("topology", "words", "message"),
    [
        (
            TENSOR,
            (HEADS,),
            "model: parallelism_config_tp_size=2 does not divide the model's num_attention_heads, 3: take",
        ),
        (
            TENSOR,
            ("model.scratch={model_type: gpt_neox, num_attention_heads: 3}",),
            "model: parallelism_config_tp_size=2: gpt_neox has no tensor-",
        ),
        (
            TENSOR,
            (FP8,),
            "train.fp8=rowwise does not work with tensor parallelism: set parallelism_config_tp_size to 1",
        ),
        (CONTEXT, (MIXED,), "model: lfm2 is not supported with context parallelism: a recurrent layer carries a "),
        (
            CONTEXT,
            ("model.scratch={model_type: falcon_h1, mamba_d_conv: 4}",),
            "model: falcon_h1 is not supported with context parallelism: a recurrent layer carries a ",
        ),
        (CONTEXT, ("attention.backend=flex",), "attention.backend: flex attends within whole rows, which context "),
        (SHARDS, PLAIN, "train.engine=reference computes in fp32 with a whole model on every process"),
        (
            SHARDS,
            ("model.scratch={model_type: t5, is_encoder_decoder: true}",),
            "model: t5 has an encoder and is trained",
        ),
    ],
)
def test_what_processes_cannot_share_is_refused_before_torch_is_loaded(
    topology: Topology, words: tuple[str, ...], message: str
) -> None:
    (found,) = problem(topology, *words).splitlines()
    assert message in found


def test_the_model_types_and_backends_that_are_refused_early_are_those_of_the_engines() -> None:
    from sftkit.models.hybrids import MIXERS
    from sftkit.ops.attention import BACKENDS

    assert {mixer.layer_type for mixer in MIXERS.values()} <= inputs.RECURRENT
    for name, backend in BACKENDS.items():
        refused = problem(CONTEXT, f"attention.backend={name}", "data.layout=fixed")
        assert bool(refused) is not backend.in_chunks, name


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        (TENSOR, ("model.scratch.num_attention_heads=4", "model.scratch.num_key_value_heads=2")),
        (TENSOR, ("model.scratch={model_type: llama}",)),
        (TENSOR, (GRAPH, "model.scratch.model_type=deepseek_v3")),
        (CONTEXT, (HEADS, FP8)),
        (SHARDS, (MIXED, "attention.backend=flex")),
        (REPLICAS, (*PLAIN, "model.scratch={model_type: t5, is_encoder_decoder: true}")),
        (STAGES, (PIPELINE, "train.pipeline_layers=[4,2]")),
        (STAGES, (PIPELINE, INTERLEAVED)),
        (STAGES, (PIPELINE, INTERLEAVED, "train.pipeline_layers=[1,1,1,1,1,1]")),
        # A single process has no stages, and sizes that transformers knows alone are left to the engine.
        (Topology(), (PIPELINE, "train.pipeline_layers=[3,2]", "model.scratch.model_type=gemma2")),
        (STAGES, (PIPELINE, "model.scratch={model_type: llama}", "train.pipeline_layers=[3,2]")),
        (STAGES, (PIPELINE, "model.scratch=null", "model.train_tokenizer=null", "model.path=runs/not_yet")),
        (SHARDS, (GRAPH, CUDA_GRAPHS)),
        (REPLICAS, ()),
        (ON_CPU, (GRAPH, "graph.passes=[regional_inductor]", "attention.backend=flex")),
    ],
)
def test_what_can_run_and_what_is_not_known_yet_is_not_refused(
    topology: Topology, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sftkit.models.files.hub_answers", lambda: False)
    assert problem(topology, *words) == ""


def test_without_a_number_of_layers_one_for_each_stage_is_still_asked_for() -> None:
    found = problem(STAGES, PIPELINE, "model.scratch={model_type: llama}", "train.pipeline_layers=[2,2,2]")
    assert "must be 2 numbers that add up to the layers of the model, or null" in found


def test_a_models_own_config_says_its_layers() -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 4}))
    words = ("model.scratch=null", "model.train_tokenizer=null", "model.path=model", PIPELINE)
    assert "add up to the 4 layers" in problem(STAGES, *words, "train.pipeline_layers=[3,2]")
    assert problem(STAGES, *words, "train.pipeline_layers=[3,1]") == ""


def test_this_machine_without_a_gpu_counts_only_for_processes_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "may_have_gpu", lambda: False)
    assert "cuda_graphs needs a GPU" in problem(Topology(), GRAPH, CUDA_GRAPHS, here=True)
    assert problem(Topology(), GRAPH, CUDA_GRAPHS) == ""
    monkeypatch.setattr(inputs, "may_have_gpu", lambda: True)
    assert problem(Topology(), GRAPH, CUDA_GRAPHS, here=True) == ""


def test_a_cpu_is_told_the_configs_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "may_have_gpu", lambda: False)
    assert "with accelerate_configs/cpu_fsdp2.yaml" in problem(REPLICAS, GRAPH, here=True)
    assert "with accelerate_configs/fsdp2.yaml or hsdp.yaml" in problem(REPLICAS, GRAPH)


def test_the_launcher_or_its_file_says_that_it_is_a_cpu() -> None:
    assert read_topology({"ACCELERATE_USE_CPU": "true"}, 2).on_cpu
    assert not read_topology({}, 2).on_cpu
    configs = ROOT / "accelerate_configs"
    assert [topology_of(configs / f"{name}.yaml").on_cpu for name in ("cpu_ddp", "cpu_tp", "ddp")] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    "script",
    [
        "chat_sft",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("base_train", "mid_train", "caption_train")),
    ],
)
def test_a_script_refuses_it_without_loading_torch(script: str) -> None:
    code = f"import sys, runpy; sys.modules['torch'] = None; runpy.run_path({str(ROOT)!r} + '/scripts/{script}.py', "
    words = [sys.executable, "-c", code + "run_name='__main__')", "recipe.yaml", GRAPH]
    env = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "ddp keeps them whole" in done.stderr
    printed = subprocess.run([*words, "--print-config"], env=env, capture_output=True, text=True, check=False)
    assert "ddp keeps them whole" not in printed.stderr, "a recipe that is only shown may be for another machine"
