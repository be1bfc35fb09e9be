// Asks an Octavo server one thing and writes the answer as it comes.

#include <absl/status/status.h>
#include <grpcpp/grpcpp.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>

#include "octavo/v1/generation.grpc.pb.h"
#include "options.h"

namespace {

// As grpcurl has it: 64 and the status's number, so that scripts can tell.
constexpr int kStatusOffset = 64;

std::shared_ptr<grpc::ChannelCredentials> credentials(const std::string& ca) {
  if (ca.empty()) return grpc::InsecureChannelCredentials();
  std::ifstream file(ca);
  if (!file) throw std::runtime_error("cannot read " + ca);
  grpc::SslCredentialsOptions tls;
  tls.pem_root_certs.assign(std::istreambuf_iterator<char>(file), {});
  return grpc::SslCredentials(tls);
}

octavo::v1::GenerateRequest request_for(const Options& options) {
  octavo::v1::GenerateRequest request;
  auto* message = request.mutable_chat()->add_messages();
  message->set_role("user");
  message->set_content(options.message);
  request.mutable_sampling()->set_temperature(0);  // greedy: the same answer each time
  request.mutable_stop()->set_max_tokens(options.max_tokens);
  return request;
}

// gRPC's codes are Abseil's, which know their names.
std::string name(grpc::StatusCode code) {
  return absl::StatusCodeToString(static_cast<absl::StatusCode>(code));
}

void report(const octavo::v1::Finished& finished) {
  const auto& usage = finished.usage();
  std::cerr << octavo::v1::FinishReason_Name(finished.reason()) << ": " << usage.prompt_tokens()
            << " prompt tokens (" << usage.cached_tokens() << " cached), "
            << usage.output_tokens() << " output tokens\n";
}

// Returns the program's exit code.
int chat(const Options& options) {
  const auto stub = octavo::v1::GenerationService::NewStub(
      grpc::CreateChannel(options.address, credentials(options.ca)));

  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::duration_cast<std::chrono::system_clock::duration>(
                           options.deadline));
  if (!options.api_key.empty()) {
    context.AddMetadata("authorization", "Bearer " + options.api_key);
  }

  const auto stream = stub->Generate(&context, request_for(options));
  int pieces = 0;
  bool cancelled = false;
  octavo::v1::GenerateResponse response;
  while (!cancelled && stream->Read(&response)) {
    if (response.has_delta()) {
      std::cout << response.delta().text() << std::flush;
      cancelled = ++pieces == options.cancel_after;
    } else if (response.has_finished()) {
      std::cout << std::endl;
      report(response.finished());
    }
  }

  if (cancelled) {
    context.TryCancel();
    stream->Finish();
    std::cout << std::endl;
    std::cerr << "cancelled after " << pieces << " pieces\n";
    return 0;
  }
  const grpc::Status status = stream->Finish();
  if (status.ok()) return 0;
  if (pieces > 0) std::cout << std::endl;
  std::cerr << "octavo-chat: " << name(status.error_code()) << ": " << status.error_message()
            << '\n';
  return kStatusOffset + status.error_code();
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse_options(argc, argv);
  try {
    return chat(options);
  } catch (const std::exception& error) {
    std::cerr << "octavo-chat: " << error.what() << '\n';
    return 1;
  }
}
