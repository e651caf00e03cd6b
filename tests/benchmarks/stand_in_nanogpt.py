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
            self.head = torch.nn.Embedding(config.vocab_size, config.vocab_size)

        def forward(self, ids, targets):
            logits = self.head(ids)
            return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

        def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
            return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas)
    """
)
"""The interface of nanoGPT's ``model.py``."""
