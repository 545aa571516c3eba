// A store that vanishes: whoever still needs it hears so in time, and what was being waited for;
// whoever is through with set-up does not need it any more.
// transports: all
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <thread>

#include "../../backend/src/gloo_backend.h"
#include "failure_cases.h"
#include "ranks.h"

namespace dmuon {
namespace {

using namespace dmuon::testing;

// A process that serves a TCPStore until it is killed. Make it before anything starts a thread.
class StoreProcess {
 public:
  StoreProcess() {
    int ends[2];
    if (::pipe(ends) != 0) throw std::runtime_error("no pipe");
    pid_ = ::fork();
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      c10d::TCPStoreOptions options;
      options.isServer = true;
      options.port = 0;
      options.waitWorkers = false;
      c10d::TCPStore served("127.0.0.1", options);
      const int port = served.getPort();
      if (::write(ends[1], &port, sizeof(port)) != sizeof(port)) ::_exit(1);
      for (;;) ::pause();
    }
    ::close(ends[1]);
    if (::read(ends[0], &port_, sizeof(port_)) != sizeof(port_)) port_ = 0;
    ::close(ends[0]);
  }
  int port() const { return port_; }
  void kill() const {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

 private:
  pid_t pid_ = -1;
  int port_ = 0;
};

Store connect(const Store& store) {
  const std::vector<uint8_t> port = store->get("port");
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(std::stoi(std::string(port.begin(), port.end())));
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

// Rank 0 also serves the store, by `server`; each rank runs `body` with it.
void runRanksWithServer(
    int size, const std::function<void(int rank, const Store& files, const Store& served)>& body,
    const std::function<void(const Store& files)>& before_end) {
  runRanks(size, [&](int rank, const Store& files) {
    if (rank != 0) {
      body(rank, files, connect(files));
      return;
    }
    const StoreProcess server;
    const std::string port = std::to_string(server.port());
    files->set("port", std::vector<uint8_t>(port.begin(), port.end()));
    std::thread killer([&] {
      before_end(files);
      server.kill();
      files->set("store is gone", std::vector<uint8_t>{1});
    });
    body(rank, files, connect(files));
    killer.join();
  });
}

void waitFor(const Store& files, const std::string& key) { files->wait({key}); }

TEST(Store, thatVanishesWhileRanksConnectFailsTheirSetUpInTime) {
  runRanksWithServer(
      3,
      [](int rank, const Store& files, const Store& served) {
        if (rank != 2) {  // rank 2 never comes
          files->set("connecting " + std::to_string(rank), std::vector<uint8_t>{1});
          EXPECT_LT(secondsOf([&] {
                      expectError([&] { createProcessGroup(served, rank, 3, seconds(8), "shard"); },
                                  {"set-up on group 'shard' rank " + std::to_string(rank) + " of 3",
                                   "Gloo has not connected all ranks"});
                    }),
                    8 + 5.0);
        }
        meet(files, "done", rank, 3);
      },
      [](const Store& files) {
        files->wait({"connecting 0", "connecting 1"});
        std::this_thread::sleep_for(milliseconds(300));
      });
}

Group makeOver(const Store& served, int rank, int size, const BackendPtr& gloo,
               milliseconds timeout) {
  auto options = c10::make_intrusive<ProcessGroupDMuon::Options>(timeout);
  options->group_name = "shard";
  return c10::make_intrusive<ProcessGroupDMuon>(
      rank, size, gloo, BackendPtr(), options,
      c10::make_intrusive<c10d::PrefixStore>("transport", served));
}

TEST(Store, thatVanishesWhileRanksChooseATransportSaysWhatWasAwaited) {
  runRanksWithServer(
      3,
      [](int rank, const Store& files, const Store& served) {
        const BackendPtr gloo = makeGlooBackend(served, rank, 3, seconds(20));
        meet(files, "connected", rank, 3);
        if (rank != 2) {  // rank 2 never says which transport it can use
          files->set("choosing " + std::to_string(rank), std::vector<uint8_t>{1});
          EXPECT_LT(secondsOf([&] {
                      expectError([&] { makeOver(served, rank, 3, gloo, seconds(8)); },
                                  {"set-up of the owner collectives on group 'shard' rank " +
                                       std::to_string(rank) + " of 3",
                                   "the store failed", "which transport the other ranks can use"});
                    }),
                    8 + 5.0);
        }
        meet(files, "done", rank, 3);
      },
      [](const Store& files) {
        files->wait({"choosing 0", "choosing 1"});
        std::this_thread::sleep_for(milliseconds(300));
      });
}

TEST(Store, thatIsThereNamesTheRankThatDoesNotCome) {
  runRanks(3, [](int rank, const Store& store) {
    const BackendPtr gloo = makeGlooBackend(store, rank, 3, seconds(20));
    if (rank != 2) {
      const double waited = secondsOf([&] {
        expectError([&] { makeOver(store, rank, 3, gloo, seconds(1)); },
                    {"set-up of the owner collectives on group 'shard'", "rank 2 did not say",
                     "within 1000 ms"});
      });
      EXPECT_LT(waited, 1 + 5.0);
    }
    meet(store, "done", rank, 3);
  });
}

TEST(Store, thatVanishesAfterSetUpIsNotMissed) {
  runRanksWithServer(
      3,
      [](int rank, const Store& files, const Store& served) {
        Group group = createProcessGroup(served, rank, 3, seconds(20), "shard");
        auto owners = group->ownerCollectives(at::kCPU);
        expectUsable(*owners);
        files->set("set up " + std::to_string(rank), std::vector<uint8_t>{1});
        waitFor(files, "store is gone");
        for (int i = 0; i < 3; ++i) expectUsable(*owners);
        // First uses as well: nothing is set up late.
        auto channel = group->newOwnerCollectives(at::kCPU, "role");
        expectUsable(*channel);
        std::vector<at::Tensor> one{at::full({2}, 1.0)};
        group->allreduce(one, c10d::AllreduceOptions())->wait();
        expectSame(one[0], at::full({2}, 3.0), "allreduce");
        channel.reset();
        owners.reset();
        EXPECT_LT(secondsOf([&] {
                    group->shutdown();
                    group.reset();
                  }),
                  5.0);
        meet(files, "done", rank, 3);
      },
      [](const Store& files) {
        files->wait({"set up 0", "set up 1", "set up 2"});
      });
}

}  // namespace
}  // namespace dmuon
