"""The LSTM language model of Zaremba et al. 2014 (arXiv:1409.2329), with torch's nn.LSTM."""

from torch import Tensor, nn

INITIAL = 0.1
"""Bound of the uniform distribution of all initial weights, -INITIAL to INITIAL (section 4.1)."""


class LSTM(nn.Module):
    """Embedding, stacked LSTM layers and a softmax layer over the vocabulary; no BatchNorm.

    Maps word numbers, N x T, to the logits of the next word, N x T x num_classes; the initial
    hidden state is zero. Dropout is applied to non-recurrent connections: after the embedding,
    between the layers and before the logits (section 3.1). `tied` uses the embedding as the last
    layer's weight (arXiv:1608.05859).

    Raises ValueError if `tied` and the sizes differ.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        embedding: int = 200,
        hidden: int = 200,
        layers: int = 2,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        if tied and embedding != hidden:
            raise ValueError(
                f"tied needs embedding ({embedding}) and hidden ({hidden}) to be the same"
            )
        self.embedding = nn.Embedding(num_classes, embedding)
        between = dropout if layers > 1 else 0.0
        self.lstm = nn.LSTM(embedding, hidden, layers, dropout=between, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, num_classes)
        if tied:
            self.head.weight = self.embedding.weight
        for weight in self.parameters():
            nn.init.uniform_(weight, -INITIAL, INITIAL)

    def forward(self, words: Tensor) -> Tensor:
        """Return the logits of the next word at each position."""
        hidden, _ = self.lstm(self.dropout(self.embedding(words)))
        logits: Tensor = self.head(self.dropout(hidden))
        return logits

    def get_classifier(self) -> nn.Linear:
        """Return the last layer, like timm's models."""
        return self.head
