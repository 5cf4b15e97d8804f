"""Hugging Face transformers' side of decode.py; runs in the peer environment.

float32, SDPA attention, greedy, inference mode. `hf-dynamic` keeps the default growing cache,
`hf-static` one allocated ahead. Only the last token's logits are computed in prefill.
"""

import os

import numpy as np
import worker

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
point = worker.parse()
worker.use_threads(point.threads)

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache  # noqa: E402
from transformers.utils import logging  # noqa: E402

logging.disable_progress_bar()


class Peer:
    def load(self) -> None:
        torch.set_num_threads(point.threads)
        self.model = AutoModelForCausalLM.from_pretrained(
            point.folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.tokens = torch.from_numpy(point.tokens(self.model.config.vocab_size))

    @torch.inference_mode()
    def prefill(self, count: int) -> None:
        config = self.model.config
        self.cache = None  # the old one goes before the new one comes
        if point.side == "hf-static":
            self.cache = StaticCache(config=config, max_cache_len=point.capacity)
        else:
            self.cache = DynamicCache(config=config)
        self.next = self._run(self.tokens[:, :count])

    @torch.inference_mode()
    def decode(self, steps: int) -> np.ndarray:
        found = []
        for _ in range(steps):
            found.append(self.next)
            self.next = self._run(self.next)
        return torch.cat(found, 1).numpy()

    def _run(self, tokens: torch.Tensor) -> torch.Tensor:
        out = self.model(tokens, cache=self.cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1:].argmax(-1)


peer = Peer()
worker.serve(worker.Side(peer.load, peer.prefill, peer.decode), point)
