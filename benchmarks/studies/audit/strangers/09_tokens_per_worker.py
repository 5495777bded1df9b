"""The loss is a mean over the tokens of a process (huggingface/transformers 34242)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Sentences(Dataset):
    """Sequences of 4 to 24 tokens, padded; labels of padding are -100."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(4, 25, (), generator=generator))
        ids = torch.zeros(25, dtype=torch.long)
        ids[: length + 1] = torch.randint(1, 50, (length + 1,), generator=generator)
        labels = ids[1:].clone()
        labels[length:] = -100
        return ids[:-1], labels


class TinyLM(nn.Module):
    def __init__(self, vocab=50, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        hidden, _ = self.rnn(self.embed(ids))
        return self.head(hidden).transpose(1, 2)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    sampler = DistributedSampler(Sentences())
    loader = DataLoader(Sentences(), batch_size=4, sampler=sampler)
    model = DistributedDataParallel(TinyLM())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss(ignore_index=-100)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for ids, labels in loader:
            loss = criterion(model(ids), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


main()
