"""A graph convolutional network labels the nodes of a graph of which it knows some labels.

From pytorch/examples, gcn/main.py (77f55b9, 2025-08-25, BSD-3-Clause), in own words.
Data: a random graph with seven communities instead of Cora.

rankzero train experiments/tutorials/graph_network.py
"""

import torch
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from rankzero import Experiment, Goal, Progress, Train

NODES, WORDS, CLASSES = 1000, 140, 7
TRAINED, VALIDATED = 504, 200


class Graph(nn.Module):
    """Nodes with words and labels. Nodes of one label share words and edges."""

    features: Tensor
    adjacency: Tensor

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(CLASSES, (NODES,), generator=generator)
        topics = torch.arange(WORDS) % CLASSES == self.labels.unsqueeze(1)
        words = torch.rand(NODES, WORDS, generator=generator) < torch.where(topics, 0.1, 0.05)
        same = self.labels == self.labels.unsqueeze(1)
        edges = torch.rand(NODES, NODES, generator=generator) < torch.where(same, 0.02, 0.002)
        edges = edges.triu(1)
        whole = (edges | edges.T).float() + torch.eye(NODES)
        root = whole.sum(1).rsqrt()
        self.register_buffer("features", words / words.sum(1, keepdim=True).clamp(min=1))
        self.register_buffer("adjacency", (root * whole * root.unsqueeze(1)).to_sparse())


class Convolution(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(nn.init.xavier_normal_(torch.empty(inputs, outputs)))

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        return adjacency @ (nodes @ self.kernel)


class Network(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.first, self.second = Convolution(WORDS, width), Convolution(width, CLASSES)
        self.drop = nn.Dropout(dropout)

    def forward(self, features: Tensor, adjacency: Tensor) -> Tensor:
        hidden = self.drop(self.first(features, adjacency).relu())
        return self.second(hidden, adjacency)


class GraphNetwork(Experiment):
    train: Train = Train(
        steps=200,
        batch_size=TRAINED,
        eval_every=20,
        seed=42,
        mlflow=Train.MLflow(log_model=False),  # MLflow has no sparse inputs.
    )
    lr: float = 0.01
    weight_decay: float = 5e-4
    dropout: float = 0.5
    width: int = 16
    goal = Goal("val/loss", "min")

    def nodes(self, first: int, last: int) -> TensorDataset:
        return TensorDataset(torch.arange(first, last), Graph().labels[first:last])

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        return self.nodes(0, TRAINED), self.nodes(TRAINED, TRAINED + VALIDATED)

    def test(self) -> TensorDataset:
        return self.nodes(TRAINED + VALIDATED, NODES)

    def helpers(self) -> dict[str, nn.Module]:
        """Return the graph. Every rank needs the whole of it, and no checkpoint does."""
        return {"graph": Graph()}

    def model(self) -> nn.Module:
        return Network(self.width, self.dropout)

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        return optim.Adam(model.parameters(), self.lr, weight_decay=self.weight_decay)

    def measure(
        self, model: nn.Module, batch: tuple[Tensor, Tensor], at: Progress
    ) -> dict[str, Tensor]:
        nodes, labels = batch
        graph = at.helpers["graph"]
        logits = model(graph.features, graph.adjacency)[nodes]
        accuracy = (logits.argmax(-1) == labels).float().mean()
        return {"loss": cross_entropy(logits, labels), "accuracy": accuracy}
