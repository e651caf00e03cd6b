"""A stand-in for a checkout of nanoGPT."""

import textwrap

STAND_IN = textwrap.dedent(
    """
    import torch

    class GPTConfig:
        def __init__(self, **shape):
            self.__dict__.update(shape)

    class GPT(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            print("number of parameters")
            wide = self.wide = config.n_embd
            self.wte = torch.nn.Embedding(config.vocab_size, wide)
            torch.nn.init.normal_(self.wte.weight, std=0.1)
            rest = wide * (config.block_size + 2) + config.n_layer * (12 * wide**2 + 13 * wide)
            self.rest = torch.nn.Parameter(torch.zeros(rest))

        def forward(self, ids, targets):
            x = self.wte(ids)
            mixed = x + x @ self.rest[: self.wide**2].view(self.wide, self.wide)
            logits = mixed @ self.wte.weight.T
            return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

        def generate(self, ids, max_new_tokens, temperature=1.0, top_k=None):
            assert top_k == 1
            return torch.cat([ids, torch.full((len(ids), max_new_tokens), 7)], dim=1)

        def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
            return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas)
    """
)
"""The interface of nanoGPT's ``model.py``, and as many parameters.

It only knows which id follows which, and generates one id.
"""
