#include "nccl_reports.h"

#include <c10/util/Exception.h>

#include <sstream>
#include <utility>

namespace dmuon {
namespace {

std::string key(int64_t number) { return "report/" + std::to_string(number); }

}  // namespace

NcclReports::NcclReports(c10::intrusive_ptr<c10d::Store> store, int rank)
    : rank_(rank), store_(std::move(store)) {}

void NcclReports::publish(Report::Kind kind, uint64_t seq, const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!store_) return;
  const std::string said = c10::str(static_cast<int>(kind), " ", rank_, " ", seq, " ", text);
  try {
    const int64_t number = store_->add("reports", 1) - 1;
    store_->set(key(number), std::vector<uint8_t>(said.begin(), said.end()));
  } catch (const std::exception&) {
    store_.reset();  // its server may have gone with rank 0
  }
}

std::vector<NcclReports::Report> NcclReports::poll() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Report> reports;
  try {
    while (store_ && store_->check({key(next_)})) {
      const std::vector<uint8_t> bytes = store_->get(key(next_++));
      std::istringstream in(std::string(bytes.begin(), bytes.end()));
      Report report;
      int kind = 0;
      in >> kind >> report.rank >> report.seq;
      in.get();
      std::getline(in, report.text, '\0');
      report.kind = static_cast<Report::Kind>(kind);
      if (report.rank != rank_) reports.push_back(std::move(report));
    }
  } catch (const std::exception&) {
    store_.reset();
  }
  return reports;
}

}  // namespace dmuon
