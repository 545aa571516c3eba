// Data parallel training of a small network in C++, without Python: Muon for the matrices, AdamW
// for the biases, whose gradients are averaged with the owner collectives themselves.
//
//   train_mlp                                     starts 4 ranks by itself
//   RANK=0 WORLD_SIZE=2 train_mlp /path/to/file   one rank of 2; they meet in that file
#include <dmuon/backend/factory.h>
#include <dmuon/optim/muon.h>
#include <sys/wait.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <vector>

using Group = std::shared_ptr<dmuon::OwnerCollectives>;

// Leaves the mean over all ranks in `tensors`, everywhere: each is reduced to an owner, which sends
// it to the others.
void average(const Group& group, const std::vector<torch::Tensor>& tensors) {
  std::vector<int64_t> owners;
  for (size_t i = 0; i < tensors.size(); ++i) owners.push_back(i % group->size());
  dmuon::OwnerOptions mean;
  mean.divisor = group->size();
  group->reduceToOwners(tensors, tensors, owners, mean)->wait();
  group->broadcastFromOwners(tensors, owners)->wait();
}

bool equalOnAllRanks(const Group& group, const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> copies;
  for (const auto& tensor : tensors) copies.push_back(tensor.detach().clone());
  group->broadcastFromOwners(copies, std::vector<int64_t>(copies.size(), 0))->wait();
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!copies[i].equal(tensors[i].detach())) return false;
  }
  return true;
}

int train(int rank, int size, const std::string& store_path) {
  torch::set_num_threads(1);
  const auto store = c10::make_intrusive<c10d::FileStore>(store_path, size);
  const auto process_group = dmuon::createProcessGroup(store, rank, size, std::chrono::seconds(60));
  const Group group = process_group->ownerCollectives(torch::kCPU);

  torch::manual_seed(0);  // the same weights everywhere
  torch::nn::Sequential model(torch::nn::Linear(16, 64), torch::nn::Tanh(),
                              torch::nn::Linear(64, 64), torch::nn::Tanh(),
                              torch::nn::Linear(64, 4));
  std::vector<torch::Tensor> matrices, biases;
  for (const auto& p : model->parameters()) (p.dim() >= 2 ? matrices : biases).push_back(p);
  dmuon::optim::Muon muon(matrices, dmuon::optim::MuonOptions(0.02), group);
  torch::optim::AdamW adamw(biases, torch::optim::AdamWOptions(1e-3));
  if (rank == 0) std::printf("%s", muon.plan().table().c_str());

  const torch::Tensor teacher = torch::randn({16, 4}) / 4;
  torch::manual_seed(1 + rank);  // different data on every rank
  const torch::Tensor x = torch::randn({256, 16}), y = torch::sin(x.matmul(teacher));

  double first = 0, last = 0;
  for (int step = 0; step < 60; ++step) {
    muon.zero_grad();
    adamw.zero_grad();
    torch::Tensor loss = torch::mse_loss(model->forward(x), y);
    loss.backward();
    muon.step();
    std::vector<torch::Tensor> shared = {loss.detach()};
    for (const auto& bias : biases) shared.push_back(bias.grad());
    average(group, shared);
    adamw.step();
    last = shared[0].item<double>();
    if (step == 0) first = last;
    if (rank == 0 && step % 10 == 0) std::printf("step %2d  mean loss %.4f\n", step, last);
  }

  const bool equal = equalOnAllRanks(group, model->parameters());
  const bool learned = last < 0.5 * first;
  if (rank == 0) std::printf("step 59  mean loss %.4f\n", last);
  if (!equal) std::fprintf(stderr, "rank %d: weights differ from rank 0's\n", rank);
  if (!learned) std::fprintf(stderr, "rank %d: loss %.4f -> %.4f\n", rank, first, last);
  process_group->shutdown();
  std::printf("rank %d of %d: %s\n", rank, size, equal && learned ? "ok" : "FAILED");
  return equal && learned ? 0 : 1;
}

int main(int argc, char** argv) {
  if (const char* rank = std::getenv("RANK")) {
    const char* size = std::getenv("WORLD_SIZE");
    if (size == nullptr || argc != 2) {
      std::fprintf(stderr, "RANK needs WORLD_SIZE and a file to meet in\n");
      return 2;
    }
    return train(std::atoi(rank), std::atoi(size), argv[1]);
  }
  char folder[] = "/tmp/dmuon_example_XXXXXX";
  const std::string file = std::string(mkdtemp(folder)) + "/store";
  constexpr int kRanks = 4;
  for (int rank = 0; rank < kRanks; ++rank) {  // before torch has started any thread
    if (fork() == 0) std::exit(train(rank, kRanks, file));
  }
  int failed = 0;
  for (int status = 0; wait(&status) > 0;) failed += status != 0;
  unlink(file.c_str());
  rmdir(folder);
  return failed == 0 ? 0 : 1;
}
