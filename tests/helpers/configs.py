"""The config.json of Llama 3.1 8B, and the `config` of a run, for tests that change them."""

LLAMA_3_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}

CONFIG = {
    "workload": {"name": "mine"},
    "model": "llama-3.1-8b",
    "device": "h100",
    "tensor_parallel": 2,
    "codec": "fp16",
    "bytes_per_block": 2**21,
    "plugins": {
        kind: {"name": name, "options": {}}
        for kind, name in [
            ("scheduler", "fcfs"),
            ("eviction", "lru"),
            ("prefix", "radix"),
            ("latency", "linear"),
        ]
    },
    "rate_scale": 1.0,
}
