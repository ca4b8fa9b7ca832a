"""The policy, a small transformer, and its task: to sort digits. Nothing here knows of actors."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

DIGITS = 8
ARROW = 10  # stands between the prompt and the answer
LENGTH = 2 * DIGITS + 1
VOCABULARY = 11


class Policy(nn.Module):
    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Of each token the logits of the next one."""
        count = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(count)
        hidden = self.tokens(tokens) + self.places.weight[:count]
        for deployer in self.layers:
            hidden = deployer(hidden, src_mask=mask, is_causal=True)
        return self.head(self.norm(hidden))

    def logprobs(self, tokens: Tensor) -> Tensor:
        """Of each token of the answers its log probability."""
        logits = self(tokens[:, :-1])[:, DIGITS:]
        answers = tokens[:, DIGITS + 1 :, None]
        return logits.log_softmax(-1).gather(-1, answers).squeeze(-1)

    @torch.no_grad()
    def sample(self, prompts: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Prompts with an answer each, and the log probabilities of the answers' tokens."""
        tokens, logprobs = prompts, []
        for _ in range(DIGITS):
            choices = self(tokens)[:, -1].log_softmax(-1)
            token = choices.exp().multinomial(1, generator=random)
            logprobs.append(choices.gather(1, token))
            tokens = torch.cat([tokens, token], 1)
        return tokens, torch.cat(logprobs, 1)


def make_prompts(count: int, random: torch.Generator) -> Tensor:
    digits = torch.randint(0, 10, (count, DIGITS), generator=random)
    return torch.cat([digits, torch.full((count, 1), ARROW)], 1)


def reward(tokens: Tensor) -> Tensor:
    """1 for each prompt whose digits are sorted in the answer, else 0."""
    expected = tokens[..., :DIGITS].sort(-1).values
    return (tokens[..., DIGITS + 1 :] == expected).all(-1).float()


def advantages(rewards: Tensor) -> Tensor:
    """Each reward against the others of its group, which has the same prompt."""
    return (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-4)


def clipped_loss(logprobs: Tensor, old: Tensor, advantage: Tensor, clip: float) -> Tensor:
    ratio = (logprobs - old).exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio * advantage, clipped * advantage).mean()


def pretrain(policy: Policy, steps: int, random: torch.Generator) -> None:
    """Supervised, until some answers are right: a reward that never comes teaches nothing."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
    for _ in range(steps):
        prompts = make_prompts(64, random)
        tokens = torch.cat([prompts, prompts[:, :DIGITS].sort(-1).values], 1)
        optimizer.zero_grad()
        (-policy.logprobs(tokens).mean()).backward()
        optimizer.step()


def fingerprint(policy: Policy) -> str:
    """The same for two policies only if all bits of their weights are."""
    found = hashlib.blake2b(digest_size=16)
    for weight in policy.state_dict().values():
        found.update(weight.numpy())
    return found.hexdigest()
