"""A Flower app like Flower's PyTorch quickstart, on photographs that need no download: python app.py."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset, TensorDataset

import leakgauge

CLIENTS, ROUNDS, BATCH = 10, 2, 32


class Net(nn.Module):
    """The small convolutional network of the quickstart, for eight classes."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 8)

    def forward(self, x):
        """Scores of the classes."""
        x = self.pool(functional.relu(self.conv1(x)))
        x = self.pool(functional.relu(self.conv2(x)))
        x = functional.relu(self.fc1(x.view(-1, 16 * 5 * 5)))
        return self.fc3(functional.relu(self.fc2(x)))


def photos():
    """Training and test images of 3x32x32 pixels in [-1, 1]."""
    found = leakgauge.load_data("photos")
    return tuple(TensorDataset(2 * part.x - 1, part.y) for part in (found.train, found.test))


ROWS = {client: range(client, 2800, 70) for client in range(CLIENTS)}

client_app = ClientApp()


@client_app.train()
def train(message, context):
    """One epoch of SGD on the client's images."""
    torch.set_num_threads(1)
    net, config = Net(), message.content["config"]
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    images = Subset(photos()[0], ROWS[context.node_config["partition-id"]])
    optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])
    for x, y in DataLoader(images, batch_size=BATCH, shuffle=True):
        optimizer.zero_grad()
        functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(images)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


server_app = ServerApp()


@server_app.main()
def main(grid, context):
    """Federated averaging."""
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
    config = ConfigRecord({"lr": 0.1})
    strategy.start(grid, ArrayRecord(Net().state_dict()), num_rounds=ROUNDS, train_config=config)


if __name__ == "__main__":
    run_simulation(server_app, client_app, CLIENTS)
