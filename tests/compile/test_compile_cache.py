"""Compiled code in a file: found again by the next process, and never a reason to stop."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import preloaded
import pytest
import torch
from helpers import tiny_llama

from sftkit.compile import cache as compile_cache
from sftkit.config.schema import AttentionConfig, CompileConfig, LossConfig, TrainConfig
from sftkit.config.topology import Topology

KEY, OTHER = "a" * 64, "b" * 64
WORKER = """
import sys, torch, torch._inductor.config
from helpers import tiny_llama
from sftkit.compile import cache as compile_cache
from sftkit.compile.contract import compile_model, warm_up
from sftkit.compile.contract import compiler_switches
from sftkit.compile.watch import CompileWatch
from sftkit.config.schema import CompileConfig

def run_shape(rows, row_length):
    block = orig_model.get_decoder().norm
    block(torch.randn(rows, row_length, 32, requires_grad=True)).sum().backward()

# No headers compiled ahead and no trials of vector instructions: they take longer than the kernels themselves.
torch._inductor.config.cpp_cache_precompile_headers = torch._inductor.config.cpp.vec_isa_ok = False
where, device = sys.argv[1:]
torch.set_default_device(device)
orig_model, compile, watch = tiny_llama().to(device), CompileConfig(), CompileWatch()
print(compile_cache.load_compiled(where, "a" * 64))
modules = compile_model(orig_model, compile)
with compiler_switches(compile, graphs=modules):
    assert warm_up(orig_model, run_shape, [(2, 16)], compile, bool)
counts, misses = watch.counts(), torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"]
print(compile_cache.save_compiled(where, "a" * 64, writes=True))
print(int(counts["compile/graphs"]), int(counts["compile/cache_hits"]), misses)
"""


def compile_elsewhere(where: str, own_cache: Path, device: str = "cpu") -> list[str]:
    """What a process with an empty cache of its own prints."""
    script = own_cache.with_suffix(".py")
    script.write_text(WORKER)
    env = {"TORCHINDUCTOR_CACHE_DIR": str(own_cache), "TRITON_CACHE_DIR": str(own_cache / "triton")}
    env |= {"PYTHONPATH": preloaded.PYTHONPATH}
    words = [str(script), where, device]
    if device == "cuda":  # a forked process has none once a library that was imported has used it, as torchao does
        done = subprocess.run([sys.executable, *words], env=os.environ | env, capture_output=True, text=True)
    else:
        done = preloaded.run(words, env=os.environ | env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_a_second_process_compiles_nothing_and_leaves_the_file_alone(tmp_path: Path, device: str) -> None:
    where = tmp_path / "graphs"
    loaded, saved, counts = compile_elsewhere(str(where), tmp_path / "first", device)
    assert loaded.startswith("no compiled code")
    assert saved.startswith("compiled code saved to")
    assert counts == "1 0 2"  # forward and backward
    (file,) = where.iterdir()
    before = file.stat().st_mtime_ns, file.read_bytes()
    loaded, saved, counts = compile_elsewhere(file.as_uri(), tmp_path / "second", device)
    assert loaded.startswith(f"compiled code from file://{file}")
    assert saved.endswith("is complete")
    graphs, hits, misses = counts.split()
    assert (graphs, misses) == ("1", "0")
    assert int(hits) >= 2
    assert (file.stat().st_mtime_ns, file.read_bytes()) == before


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What load handed to torch; torch in turn has b"artifacts" to save."""
    monkeypatch.delenv("SFTKIT_CACHE_SECRET", raising=False)
    handed: list[bytes] = []
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda content: handed.append(content) or object())
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"arti\nfacts", object()))
    monkeypatch.setitem(compile_cache.counters, "inductor", {"fxgraph_cache_miss": 2})
    return handed


@pytest.mark.parametrize("form", ["folder", "file", "file://folder", "file://file"])
def test_a_folder_a_file_and_a_url_of_either_hold_what_was_saved(tmp_path: Path, fake_torch, form: str) -> None:
    path = tmp_path / "new" / ("x.compiled" if form.endswith("file") else "caches")
    where = path.as_uri() if "://" in form else str(path)
    assert "saved" in compile_cache.save_compiled(where, KEY, writes=True)
    assert compile_cache.load_compiled(where, KEY).startswith("compiled code from")
    assert fake_torch == [b"arti\nfacts"]
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert len(files) == 1  # nothing temporary is left
    assert files[0] == path if form.endswith("file") else files[0].parent == path


def test_a_folder_holds_one_file_per_key(tmp_path: Path, fake_torch) -> None:
    for key in (KEY, OTHER, KEY):
        compile_cache.save_compiled(str(tmp_path), key, writes=True)
    assert len(list(tmp_path.iterdir())) == 2
    assert compile_cache.load_compiled(str(tmp_path), "c" * 64).startswith("no compiled code")


def test_only_the_main_rank_writes_and_only_what_was_compiled_cold(tmp_path: Path, fake_torch, monkeypatch) -> None:
    where = str(tmp_path / "x.compiled")
    assert compile_cache.save_compiled(where, KEY, writes=False) == ""
    assert not Path(where).exists()
    monkeypatch.setitem(compile_cache.counters, "inductor", {"fxgraph_cache_miss": 0})
    assert "saved" in compile_cache.save_compiled(
        where, KEY, writes=True
    )  # all of it from torch's own cache: still worth a file
    before = Path(where).stat().st_ino
    assert "complete" in compile_cache.save_compiled(where, KEY, writes=True)
    assert Path(where).stat().st_ino == before
    assert "saved" in compile_cache.save_compiled(where, OTHER, writes=True)
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: None)
    assert "nothing was compiled" in compile_cache.save_compiled(where, KEY, writes=True)


def swap_key(content: bytes) -> bytes:
    return content.replace(KEY.encode(), OTHER.encode())


DAMAGES = {
    "another model": swap_key,
    "damaged": lambda content: content.replace(b"arti", b"arty"),
    "not a file of compiled code": lambda content: os.urandom(1000),
    "not a file of compiled code ": lambda content: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_no_use_is_a_warning_and_then_replaced(tmp_path: Path, fake_torch, caplog, damage: str) -> None:
    file = tmp_path / "x.compiled"
    compile_cache.save_compiled(str(file), KEY, writes=True)
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    assert compile_cache.load_compiled(str(file), KEY) == "cold compile"
    assert damage.strip() in caplog.text
    assert fake_torch == []
    compile_cache.save_compiled(str(file), KEY, writes=True)
    assert compile_cache.load_compiled(str(file), KEY).startswith("compiled code from")


def loads(where: object) -> bool:
    """Whether saved code is loaded; if not, nothing is handed to torch."""
    return compile_cache.load_compiled(str(where), KEY).startswith("compiled code from")


def test_code_that_others_can_have_written_is_loaded_with_the_signature_of_a_shared_secret_only(
    tmp_path: Path, fake_torch, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    file = tmp_path / "x.compiled"
    old_umask = os.umask(0o002)
    try:
        compile_cache.save_compiled(str(file), KEY, writes=True)
    finally:
        os.umask(old_umask)
    assert loads(file)
    file.chmod(0o664)
    assert not loads(file)
    assert "other users could have written this code" in caplog.text
    file.chmod(0o644)
    monkeypatch.setattr(os, "getuid", lambda: os.stat(file).st_uid + 1)
    assert loads(file) == (os.stat(file).st_uid == 0)
    file.chmod(0o664)
    monkeypatch.setenv("SFTKIT_CACHE_SECRET", "ours")
    assert not loads(file)
    assert "not signed with" in caplog.text
    compile_cache.save_compiled(str(file), KEY, writes=True)
    file.chmod(0o666)
    assert loads(file)
    monkeypatch.setenv("SFTKIT_CACHE_SECRET", "theirs")
    assert not loads(file)
    monkeypatch.setenv("SFTKIT_CACHE_SECRET", "ours")
    with ZipFile(file) as signed:
        signature, content = signed.read("signature"), signed.read("torch") + b"more"
    with ZipFile(file, "w") as forged:
        forged.comment = KEY.encode()
        forged.writestr("signature", signature)
        forged.writestr("torch", content)
    assert not loads(file)
    assert "ours" not in caplog.text
    assert set(fake_torch) == {b"arti\nfacts"}


def test_code_of_a_url_is_saved_and_loaded_with_a_secret_only(fake_torch, monkeypatch, caplog) -> None:
    where = "memory://shared/graphs"
    assert "without SFTKIT_CACHE_SECRET" in compile_cache.save_compiled(where, KEY, writes=True)
    monkeypatch.setenv("SFTKIT_CACHE_SECRET", "ours")
    assert "saved to" in compile_cache.save_compiled(where, KEY, writes=True)
    assert loads(where)
    monkeypatch.delenv("SFTKIT_CACHE_SECRET")
    assert not loads(where)
    assert "other users could have written" in caplog.text


def test_content_that_torch_cannot_read_is_a_warning(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"garbage", object()))
    compile_cache.save_compiled(str(tmp_path), KEY, writes=True)
    assert compile_cache.load_compiled(str(tmp_path), KEY) == "cold compile"
    assert "torch cannot read it" in caplog.text


@pytest.mark.parametrize("where", ["/proc/nowhere", "unknown://bucket/graphs"])
def test_a_place_that_cannot_be_used_is_a_warning_never_an_error(where, fake_torch, monkeypatch, caplog) -> None:
    monkeypatch.setenv("SFTKIT_CACHE_SECRET", "ours")
    compile_cache.load_compiled(where, KEY)
    assert "not saved" in compile_cache.save_compiled(where, KEY, writes=True)
    assert "cannot be written" in caplog.text


def make_key(**changes) -> str:
    cfg = SimpleNamespace(
        adapter=changes.get("adapter"),
        adapters=None,
        compile=changes.get("compile", CompileConfig()),
        attention=changes.get("attention", AttentionConfig()),
        loss=LossConfig(),
        train=changes.get("train", TrainConfig()),
    )
    shapes = changes.get("shapes", ((8, 2048),))
    layout = SimpleNamespace(kind="packed", shapes=shapes, max_doc_length=2048, max_docs=lambda rows, _: 2 * rows)
    topology = changes.get("topology", Topology())
    rt = SimpleNamespace(device=torch.device("cpu"), precision=changes.get("precision", "fp32"), topology=topology)
    return compile_cache.code_key(cfg, changes.get("model") or tiny_llama(), layout, rt)


def test_the_key_changes_with_whatever_changes_the_code_and_with_nothing_else(monkeypatch) -> None:
    same = [
        make_key(),
        make_key(model=tiny_llama(seed=1)),
        make_key(compile=CompileConfig(cache="elsewhere", on_recompile="warn", on_failure="error")),
        make_key(train=TrainConfig(max_steps=7)),
    ]
    renamed = tiny_llama()
    renamed.config._name_or_path = "runs/x/step-000100"
    same.append(make_key(model=renamed))
    same.append(make_key(topology=Topology(replicas=4)))
    other = [
        make_key(model=tiny_llama(layers=3)),
        make_key(model=tiny_llama().to(torch.bfloat16)),
        make_key(shapes=((4, 2048),)),
        make_key(precision="bf16"),
        make_key(compile=CompileConfig(scope="model")),
        make_key(compile=CompileConfig(activation_memory_budget=0.5)),
        make_key(attention=AttentionConfig(backend="flex")),
        make_key(train=TrainConfig(memory="low")),
        make_key(train=TrainConfig(freeze=("lm_head.*",))),
        make_key(topology=Topology(tensor=2, sharded=True)),
    ]
    monkeypatch.setattr(compile_cache.hardware, "installed_version", lambda package: "99")
    other.append(make_key())
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "vectors of another width")
    other.append(make_key())
    assert len(set(same)) == 1
    assert len({*same, *other}) == 1 + len(other)


def test_flash_attention_kernels_travel_in_the_file(
    tmp_path: Path, fake_torch: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "v1" / "bwd").mkdir(parents=True)
    (there / "v1" / "bwd" / "a.o").write_bytes(b"code\n\0")
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(there))
    file = str(tmp_path / "x.compiled")
    compile_cache.save_compiled(file, KEY, writes=True)
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(here))
    assert compile_cache.load_compiled(file, KEY).startswith("compiled code from")
    assert fake_torch == [b"arti\nfacts"]
    assert (here / "v1" / "bwd" / "a.o").read_bytes() == b"code\n\0"
    for name in ("../../outside.o", "/outside.o", "v1/bwd/a.so"):
        with pytest.raises(ValueError, match="no name of a kernel"):
            compile_cache.write_kernels({name: b""})
