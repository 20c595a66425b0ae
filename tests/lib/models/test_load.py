from __future__ import annotations

import importlib.util
import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import closecall
from closecall.models import convert as converting
from closecall.models import load
from closecall.models.cache import UnavailableError
from closecall.models.known.smollm2 import SOURCE

transformers = pytest.importorskip("transformers")

TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if enable_thinking is defined %}quick {% endif %}"
WORDS = ["<pad>", "<end>", "a", "b", "c"]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reaches for the hub, whatever the machine could."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLOSECALL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "smollm2"


def tiny_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": len(WORDS)}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, pad_token_id=0, eos_token_id=1))


def tiny_tokenizer(template: str | None = TEMPLATE) -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    made.chat_template = template
    return made


def save(directory: Path, *, seed: int = 0, template: str | None = TEMPLATE) -> Path:
    tiny_model(seed).save_pretrained(directory)
    tiny_tokenizer(template).save_pretrained(directory)
    return directory


def test_a_local_directory(tmp_path: Path) -> None:
    loaded = load.load_model(save(tmp_path / "mine"))
    assert loaded.entry is None
    assert loaded.context == 128
    assert loaded.model.config._attn_implementation == "sdpa"
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.tokenizer.pad_token == "<end>"
    text = loaded.prompt("a b", multiple_choice=True)
    assert text == "[a b]"
    ids = loaded.tokenizer(text, return_tensors="pt", add_special_tokens=False)
    assert loaded.model.generate(**ids, max_new_tokens=2, do_sample=False).shape[1] > ids.input_ids.shape[1]


def test_load_is_public(tmp_path: Path) -> None:
    loaded = closecall.load(save(tmp_path / "mine"), dtype="bf16")
    assert isinstance(loaded, closecall.LoadedModel)
    assert loaded.model.dtype == torch.bfloat16


def test_no_template_means_the_question_itself(tmp_path: Path) -> None:
    assert load.load_model(save(tmp_path / "mine", template=None)).prompt("a b") == "a b"


def test_a_directory_with_a_panel_models_name_gets_its_quirks(tmp_path: Path) -> None:
    loaded = load.load_model(str(save(tmp_path / "Qwen3.6-35B-A3B")))
    assert loaded.entry is not None
    assert loaded.entry.name == "qwen3.6-35b"
    assert loaded.prompt("a") == "[a]quick "
    assert loaded.prompt("a", multiple_choice=True) == "[a]quick The correct answer is ("


def test_a_panel_model_is_loaded_by_hub_id_with_its_tokenizer_options(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def answer(result: Any) -> Any:
        def from_pretrained(where: str, **options: Any) -> Any:
            calls.append((where, options))
            return result

        return from_pretrained

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", answer(None))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", answer(tiny_tokenizer()))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", answer(tiny_model()))
    loaded = load.load_model("mistral-nemo", dtype="bf16")
    assert loaded.label == "mistralai/Mistral-Nemo-Instruct-2407"
    config, tokenizer, model = calls
    assert {where for where, _ in calls} == {loaded.label}
    assert tokenizer[1] == {"trust_remote_code": False, "fix_mistral_regex": True}
    assert model[1] == {"trust_remote_code": False, "dtype": torch.bfloat16}
    assert config[1] == {"trust_remote_code": False}


@pytest.mark.parametrize(("family", "expected"), [("gpt_oss", "eager"), ("qwen3", "sdpa")])
def test_attention_is_sdpa_or_eager_where_there_is_none(family: str, expected: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": len(WORDS)}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "eos_token_id": 1}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1} if family == "gpt_oss" else {}
    kinds = {"layer_types": ["full_attention"] * 2}
    config = transformers.AutoConfig.for_model(family, **sizes, **heads, **experts, **kinds)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert load.load_model(tmp_path).model.config._attn_implementation == expected


def test_the_fingerprint_goes_by_what_is_loaded_not_from_where(tmp_path: Path) -> None:
    first = load.load_model(save(tmp_path / "one")).fingerprint
    assert load.load_model(save(tmp_path / "two")).fingerprint == first
    assert load.load_model(save(tmp_path / "three", seed=1)).fingerprint != first
    assert load.load_model(tmp_path / "one", dtype="bf16").fingerprint != first


def test_dtypes(tmp_path: Path) -> None:
    path = save(tmp_path / "mine")
    assert load.load_model(path).model.dtype == torch.float32
    assert load.load_model(path, dtype=torch.float16).model.dtype == torch.float16
    with pytest.raises(ValueError, match="did you mean 'bf16'"):
        load.load_model(path, dtype="bf61")


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    for device in ("cuda:77", "nonsense"):
        with pytest.raises(ValueError, match=rf"device '{device}' cannot be used here"):
            load.load_model(tmp_path, device=device)


def test_names_that_are_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"did you mean 'smollm2'.*hub id like owner/name"):
        load.load_model("smolm2")
    with pytest.raises(UnavailableError, match="no such directory"):
        load.load_model(tmp_path / "nothing")
    (tmp_path / "weights.bin").write_text("")
    with pytest.raises(UnavailableError, match="is a file"):
        load.load_model(tmp_path / "weights.bin")


def test_a_hub_id_without_a_network() -> None:
    with pytest.raises(UnavailableError, match="owner/name is not in the hub's local cache, and the hub cannot"):
        load.load_model("owner/name")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "t5"}, "no causal language model"),
        ({"model_type": "nonsense"}, "pip install --upgrade transformers"),
        ({"model_type": "nonsense", "auto_map": {"AutoConfig": "a.B"}}, "trust_remote_code=True"),
        ({"model_type": "llama"}, "weights and tokenizer files"),
        (None, "could not be loaded"),
    ],
)
def test_directories_that_cannot_be_loaded(config: dict[str, Any] | None, expected: str, tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnavailableError, match=expected):
        load.load_model(tmp_path)


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(UnavailableError, match="no tokenizer"):
        load.load_model(tmp_path)


def without(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else real(name))


def test_no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    without("transformers", monkeypatch)
    with pytest.raises(UnavailableError, match=r"pip install 'closecall\[hf\]'"):
        load.load_model("smollm2")


def test_smollm2_not_fetched_or_damaged(cache: Path) -> None:
    with pytest.raises(UnavailableError, match=r"run `closecall get smollm2` \(93 MB, once\)"):
        load.load_model("smollm2")
    (cache / SOURCE.gguf).write_bytes(b"damaged")
    with pytest.raises(UnavailableError, match=r"wrong sha256.*closecall get smollm2"):
        load.load_model("smollm2")


def test_smollm2_without_gguf(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without("gguf", monkeypatch)
    with pytest.raises(UnavailableError, match=r"gguf.*closecall\[hf\]"):
        load.load_model("smollm2")


@pytest.fixture
def dequantised(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """As if the GGUF file were there, and reading it gave the tiny model; the calls are counted."""
    cache.mkdir(parents=True)
    (cache / SOURCE.gguf).write_bytes(b"")
    monkeypatch.setattr(converting, "fetched", lambda source: True)
    calls: list[Path] = []

    def write(_: Any, source: Any, directory: Path) -> None:
        calls.append(source.gguf_path)
        save(directory)

    monkeypatch.setattr(converting, "_write", write)
    return calls


def test_smollm2_is_dequantised_once(cache: Path, dequantised: list[Path]) -> None:
    first = load.load_model("smollm2")
    second = load.load_model("SmolLM2")
    assert len(dequantised) == 1
    assert first.fingerprint == second.fingerprint
    assert first.label == second.label == "SmolLM2-135M-Instruct, Q4_1 weights dequantised to float32"
    assert second.entry is not None
    assert second.context == 8192
    cast = load.load_model("smollm2", dtype="bf16")
    assert cast.model.dtype == torch.bfloat16
    assert cast.label.endswith("dequantised to float32, then cast to bfloat16")


def test_half_a_conversion_is_not_used(cache: Path, dequantised: list[Path]) -> None:
    (cache / "float32.part").mkdir()  # a run that was killed while it saved
    save(cache / "float32", seed=1)  # and a directory that nothing vouches for
    wanted = load.fingerprint(tiny_model())
    assert load.load_model("smollm2").fingerprint == wanted
    assert load.load_model("smollm2").fingerprint == wanted
    assert len(dequantised) == 1
    assert not (cache / "float32.part").exists()


def test_a_conversion_of_another_file_is_not_used(cache: Path, dequantised: list[Path]) -> None:
    save(cache / "float32", seed=1)
    (cache / "float32" / "source.json").write_text(json.dumps({"sha256": "another"}))
    assert load.load_model("smollm2").fingerprint == load.fingerprint(tiny_model())


@pytest.mark.parametrize("change", ["cut", "gone"])
def test_a_damaged_conversion_is_made_again(cache: Path, dequantised: list[Path], change: str) -> None:
    wanted = load.load_model("smollm2").fingerprint
    weights = cache / "float32" / "model.safetensors"
    if change == "gone":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:-1])
    assert load.load_model("smollm2").fingerprint == wanted
    assert len(dequantised) == 2


def test_what_is_converted_needs_no_lock(cache: Path, dequantised: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    load.load_model("smollm2")

    def busy(*_: Any, **__: Any) -> None:
        raise AssertionError("took the lock")

    monkeypatch.setattr(converting, "locked", busy)
    load.load_model("smollm2")


def test_a_full_disk_leaves_no_half_conversion(
    cache: Path, dequantised: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(UnavailableError, match=r"could not write .*No space left.*free some space"):
            load.load_model("smollm2")
    assert {p.name for p in cache.iterdir()} == {".lock", SOURCE.gguf}
    assert load.load_model("smollm2").label


def test_too_little_disk_is_said_before_the_conversion(
    cache: Path, dequantised: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=10**6))
    with pytest.raises(UnavailableError, match=r"545 MB needed, 1 MB free"):
        load.load_model("smollm2")
    assert not dequantised


def test_a_tokenizer_that_begins_every_text(tmp_path: Path) -> None:
    """The begin token survives saving, and a prompt without a template has it as text."""
    path = save(tmp_path / "mine", template=None)
    tokenizer = tiny_tokenizer(None)
    tokenizer.add_special_tokens({"bos_token": "<pad>"})
    converting.put_bos_in_front(tokenizer)
    tokenizer.save_pretrained(path)
    loaded = load.load_model(path)
    assert loaded.tokenizer("a b").input_ids == [0, 2, 3]
    assert loaded.tokenizer("a", "b").input_ids == [0, 2, 0, 3]
    assert loaded.prompt("a b") == "<pad>a b"
    assert loaded.tokenizer(loaded.prompt("a b"), add_special_tokens=False).input_ids == [0, 2, 3]
