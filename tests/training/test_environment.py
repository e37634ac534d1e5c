import torch

from vicinal.training.environment import describe_environment


def test_the_environment_names_versions_and_machine():
    found = describe_environment(torch.device("cpu"), processes=2, seed=3)
    assert (found["device"], found["processes"], found["seed"]) == ("cpu", 2, 3)
    assert found["threads"] == torch.get_num_threads()
    assert set(found["versions"]) >= {"torch", "timm", "vicinal", "accelerate"}
