"""Fine-tune a transformer by LoRA: nodes train and send only the adapters.

The transformer is tiny and has random weights, so that nothing is downloaded; replace it
by `AutoModelForSequenceClassification.from_pretrained(...)`. Needs fedbudget[torch],
transformers and peft.
"""

import numpy as np
import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import fedbudget

WORDS = 50


class Classifier(nn.Module):
    """A transformer with adapters; a batch is word numbers [samples, 12], 0 for padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # the frozen part must be the same at all nodes
        config = BertConfig(
            vocab_size=WORDS,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            num_labels=2,
        )
        adapters = LoraConfig(
            task_type=TaskType.SEQ_CLS, r=4, target_modules=["query", "value"]
        )
        self.transformer = get_peft_model(BertForSequenceClassification(config), adapters)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.transformer(
            input_ids=tokens, attention_mask=(tokens > 0).long()
        ).logits
        return scores


def texts(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return texts of 12 words; those with word 1 belong to the second class."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(2, WORDS, (count, 12))
    labels = rng.integers(0, 2, count)
    tokens[np.arange(count), rng.integers(0, 12, count)] += labels * (1 - WORDS)
    return np.where(tokens < 2, 1, tokens), labels


result = fedbudget.train(
    model=Classifier,
    shards=[texts(200, seed) for seed in range(3)],
    test=texts(200, 3),
    budget=["time=20s", "bytes=10MB"],
)
sent = len(result.w)
total = sum(each.numel() for each in Classifier().parameters())
print(f"accuracy {result.accuracy:.2f}; {sent:,} of {total:,} parameters were sent")
