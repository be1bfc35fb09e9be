#include "options.h"

#include <getopt.h>

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <optional>

namespace {

constexpr char kUsage[] =
    R"(usage: octavo-chat [OPTION]... MESSAGE

Asks an Octavo server one thing and writes the answer as it comes.

  --address HOST:PORT  the server; default $OCTAVO_ADDRESS, or localhost:50051
  --api-key KEY        says who asks; default $OCTAVO_API_KEY, or nobody
  --ca FILE            TLS, the server's authority in PEM; default $OCTAVO_CA, or no TLS
  --deadline SECONDS   give up after this long; default 60
  --max-tokens N       most tokens of the answer; default 512
  --cancel-after N     cancel the call after N pieces of text
)";

constexpr int kWrongUsage = 2;

[[noreturn]] void wrong(const std::string& what) {
  std::cerr << "octavo-chat: " << what << "\n\n" << kUsage;
  std::exit(kWrongUsage);
}

std::string variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

template <typename Number>
Number positive(const char* option, const char* text) {
  Number number{};
  const char* end = text + std::strlen(text);
  const auto [rest, error] = std::from_chars(text, end, number);
  if (error != std::errc{} || rest != end || !(number > 0)) {
    wrong(std::string(option) + " takes a number above 0, not '" + text + "'");
  }
  return number;
}

}  // namespace

Options parse_options(int argc, char** argv) {
  Options options;
  options.address = variable("OCTAVO_ADDRESS", "localhost:50051");
  options.api_key = variable("OCTAVO_API_KEY", "");
  options.ca = variable("OCTAVO_CA", "");

  enum Flag { kAddress = 1, kApiKey, kCa, kDeadline, kMaxTokens, kCancelAfter, kHelp };
  const option flags[] = {
      {"address", required_argument, nullptr, kAddress},
      {"api-key", required_argument, nullptr, kApiKey},
      {"ca", required_argument, nullptr, kCa},
      {"deadline", required_argument, nullptr, kDeadline},
      {"max-tokens", required_argument, nullptr, kMaxTokens},
      {"cancel-after", required_argument, nullptr, kCancelAfter},
      {"help", no_argument, nullptr, kHelp},
      {},
  };
  opterr = 0;
  for (int flag; (flag = getopt_long(argc, argv, "", flags, nullptr)) != -1;) {
    switch (flag) {
      case kAddress: options.address = optarg; break;
      case kApiKey: options.api_key = optarg; break;
      case kCa: options.ca = optarg; break;
      case kDeadline:
        options.deadline = std::chrono::duration<double>(positive<double>("--deadline", optarg));
        break;
      case kMaxTokens: options.max_tokens = positive<std::uint32_t>("--max-tokens", optarg); break;
      case kCancelAfter: options.cancel_after = positive<int>("--cancel-after", optarg); break;
      case kHelp: std::cout << kUsage; std::exit(0);
      default: wrong(std::string("cannot use ") + argv[optind - 1]);
    }
  }
  if (optind + 1 != argc) wrong("exactly one MESSAGE is needed");
  options.message = argv[optind];
  return options;
}
