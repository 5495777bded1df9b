"""A contrastive loss over features gathered with gradients (mlfoundations/open_clip 616)."""

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
        self.text = nn.Embedding(10, 16)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images, texts):
        image_features = F.normalize(self.visual(images), dim=-1)
        text_features = F.normalize(self.text(texts), dim=-1)
        return image_features, text_features, self.logit_scale.exp()


def clip_loss(image_features, text_features, scale):
    all_images = torch.cat(torch.distributed.nn.all_gather(image_features))
    all_texts = torch.cat(torch.distributed.nn.all_gather(text_features))
    logits = scale * all_images @ all_texts.T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    pairs = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
    sampler = DistributedSampler(pairs)
    loader = DataLoader(pairs, batch_size=16, sampler=sampler, drop_last=True)
    model = DDP(TwoTowers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, texts in loader:
            loss = clip_loss(*model(images, texts))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


main()
