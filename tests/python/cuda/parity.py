"""Random models of transformers, and `tokenrouter generate` on the same GPU. Needs a GPU, torch and transformers.

    python3 tests/python/cuda/parity.py TOKENROUTER [SEED]

TOKENROUTER is the program. Every model is saved in bf16 and answers prompts of several lengths greedily, by the program
in bf16 and in f32. transformers then reads prompt and answer in one piece. Compared are the log-probability of each
token and the signals of its row, as norm of the difference over norm: at most 1e-4 in f32. There every token must be
transformers' own first choice, or within TIE of it.

In bf16, where transformers' own logits are 2e-2 to 3e-2 from its f32 for such models, the program is at most 2e-2, or
SLACK times as far as transformers' bf16, from that f32. The table shows all three distances.

Prints a table, and exits with 1 when a bound does not hold.
"""

import json
import math
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import torch
import transformers
from transformers import (LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM,
                          Qwen3Config, Qwen3ForCausalLM)

DEVICE = "cuda"
TOKENIZER = pathlib.Path(__file__).resolve().parents[3] / "models" / "demo" / "small"
VOCABULARY, ENDS = 2048, (2045, 2047)
PROMPTS, ANSWER = (1, 60, 700), 24  # 700: the prompt's own kernels, and chunks
TIE, SLACK = 1e-5, 1.5
BOUNDS = {"bf16": 2e-2, "f32": 1e-4}
TYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
SIGNALS = ("entropy", "entropy_norm", "top1_prob", "margin", "logsumexp", "candidate_prob")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 256}

# name: classes, hidden size, heads, key/value heads, width of a head, further keys
MODELS = {
    "qwen3-tied": (Qwen3Config, Qwen3ForCausalLM, 256, 4, 4, 64, {"tie_word_embeddings": True}),
    "qwen3-group8": (Qwen3Config, Qwen3ForCausalLM, 512, 16, 2, 128, {}),
    "qwen3-dim96": (Qwen3Config, Qwen3ForCausalLM, 768, 8, 2, 96, {}),
    "llama-rope3": (LlamaConfig, LlamaForCausalLM, 512, 8, 8, 64, {"rope": LLAMA3}),
    "llama-rope3-wide": (LlamaConfig, LlamaForCausalLM, 1024, 8, 1, 128, {"rope": LLAMA3}),
    "llama-dim96": (LlamaConfig, LlamaForCausalLM, 768, 8, 4, 96, {"tie_word_embeddings": True}),
    "qwen2-bias": (Qwen2Config, Qwen2ForCausalLM, 512, 8, 2, 64, {"tie_word_embeddings": True}),
    "qwen2-group7": (Qwen2Config, Qwen2ForCausalLM, 896, 14, 2, 64, {}),
    "mistral": (MistralConfig, MistralForCausalLM, 1024, 8, 2, 128, {"sliding_window": None}),
}


def build(name, directory):
    """Save the model `name`, in bf16, with a tokenizer."""
    config_class, model_class, hidden, heads, kv_heads, dim, keys = MODELS[name]
    keys = dict(keys)
    rope = {"rope_type": "default", **keys.pop("rope", {})}
    if hasattr(config_class(), "rope_parameters"):
        keys["rope_parameters"] = {"rope_theta": 1e4, **rope}
    else:
        keys["rope_theta"] = 1e4
        keys["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    if config_class is not Qwen2Config:  # there it is hidden size / heads
        keys["head_dim"] = dim
    keys.setdefault("tie_word_embeddings", False)
    config = config_class(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=hidden * 5 // 2 // 32 * 32, num_hidden_layers=3,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=2048, bos_token_id=None,
        eos_token_id=ENDS[1], pad_token_id=None, initializer_range=1.5 / math.sqrt(hidden), **keys)
    model = model_class(config)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if "norm" in key:
                tensor.normal_(1.0, 0.1)
            elif key.endswith("bias"):
                tensor.normal_(0.0, 0.5)
        model.lm_head.weight[list(ENDS)] = 0.0  # answers do not end early
    model.to(torch.bfloat16).save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / file, directory / file)


def load(model_class, directory, dtype):
    # Not `.to(dtype)`: that would round the frequencies of RoPE as well.
    key = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    return model_class.from_pretrained(directory, attn_implementation="eager", **{key: TYPES[dtype]}).to(DEVICE).eval()


def configuration(directory):
    """All models in both types, in one file; only what a route needs is loaded."""
    lines = []
    for name in MODELS:
        for dtype in BOUNDS:
            lines += [f"[models.{name}-{dtype}]", f'path = "{directory / name}"', 'device = "cuda:0"',
                      f'dtype = "{dtype}"', 'kv_memory = "256MiB"', ""]
    path = directory / "parity.toml"
    path.write_text("\n".join(lines))
    return path


def ask(program, config, route, prompt):
    """The program's tokens, as `--json` gives them."""
    command = [program, "generate", str(config), "--route", route, "--prompt-ids", ",".join(map(str, prompt)),
               "--max-tokens", str(ANSWER), "--temperature", "0", "--json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if run.returncode != 0:
        raise SystemExit(f"{' '.join(command)[:300]}\n{run.stderr[-2000:]}")
    answer = json.loads(run.stdout)
    if answer["usage"]["prompt_tokens"] != len(prompt) or len(answer["tokens"]) != ANSWER:
        raise SystemExit(f"{route}: {answer['usage']}, not {len(prompt)} and {ANSWER} tokens")
    return answer["tokens"]


def logits_of(model, prompt, tokens):
    """transformers' logits [tokens, vocabulary] of the rows before each token."""
    ids = torch.tensor([prompt + tokens[:-1]], device=DEVICE)
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1:].double()


def expected(logits, tokens):
    """Log-probabilities and signals by name, [tokens] each."""
    logprobs = logits.log_softmax(-1)
    probabilities = logprobs.exp()
    best = probabilities.topk(2, -1).values
    entropy = -(probabilities * logprobs).sum(-1)
    chosen = logprobs.gather(-1, torch.tensor(tokens, device=DEVICE)[:, None])[:, 0]
    return {"logprob": chosen, "entropy": entropy, "entropy_norm": entropy / math.log(logits.shape[-1]),
            "top1_prob": best[:, 0], "margin": best[:, 0] - best[:, 1], "logsumexp": logits.logsumexp(-1),
            "candidate_prob": chosen.exp()}


def values_of(entries):
    """What the program gave, as `expected` does."""
    value = lambda entry, name: entry["logprob"] if name == "logprob" else entry["signals"][name]
    return {name: torch.tensor([value(entry, name) for entry in entries], dtype=torch.float64, device=DEVICE)
            for name in ("logprob",) + SIGNALS}


def errors(got, want):
    """Relative errors by name. Those of a margin are relative to the probability that it is taken from; logarithms near
    zero count as one nat."""
    result = {}
    for name, values in want.items():
        if not torch.isfinite(got[name]).all():
            result[name] = math.inf
            continue
        scale = want["top1_prob"] if name == "margin" else values
        least = math.sqrt(len(values)) if name in ("logprob", "entropy", "logsumexp") else 0.0
        result[name] = ((got[name] - values).norm() / max(scale.norm().item(), least)).item()
    return result


def main():
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    program = str(pathlib.Path(sys.argv[1]).resolve())
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else time.time_ns() % 2**32
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    print(f"seed {seed}, torch {torch.__version__}, transformers {transformers.__version__}, "
          f"{torch.cuda.get_device_name()}", flush=True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    columns = ("logprob",) + SIGNALS
    print(f"{'model':<18}{'type':<6}{'prompt':>7}{'against':>9}  " + "".join(f"{c:>15}" for c in columns) + "  tokens")
    failures = 0
    with tempfile.TemporaryDirectory() as directory:
        directory = pathlib.Path(directory)
        config = configuration(directory)
        for model, (_, model_class, *_) in MODELS.items():
            build(model, directory / model)
            models = {dtype: load(model_class, directory / model, dtype) for dtype in BOUNDS}
            for length in PROMPTS:
                prompt = torch.randint(0, VOCABULARY - 3, (length,)).tolist()
                for dtype, bound in BOUNDS.items():
                    entries = ask(program, config, f"{model}-{dtype}", prompt)
                    tokens = [entry["id"] for entry in entries]
                    logits = {against: logits_of(models[against], prompt, tokens) for against in BOUNDS}
                    wanted = {against: expected(logits[against], tokens) for against in BOUNDS}
                    best = logits["f32"].max(-1).values
                    chosen = logits["f32"].gather(-1, torch.tensor(tokens, device=DEVICE)[:, None])[:, 0]
                    same = int((chosen >= best - TIE).sum())
                    found = {against: errors(values_of(entries), wanted[against]) for against in BOUNDS}
                    if dtype == "f32":
                        shown = {"f32": found["f32"]}
                        held = max(found["f32"].values()) <= bound and same == len(tokens)
                    else:
                        own = errors(wanted["bf16"], wanted["f32"])
                        shown = {**found, "own": own}
                        held = all(error <= max(bound, SLACK * own[name]) for name, error in found["f32"].items())
                    for against, error in shown.items():
                        print(f"{model:<18}{dtype:<6}{length:>7}{against:>9}  "
                              + "".join(f"{error[c]:>15.2e}" for c in columns) + f"  {same}/{len(tokens)}", flush=True)
                    if not held:
                        failures += 1
                        print(f"{model}, {dtype}, a prompt of {length}: FAILED", flush=True)
            del models
            torch.cuda.empty_cache()
    print(f"{failures} failed")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
