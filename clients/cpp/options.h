// What octavo-chat is asked to do, read from the command line.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

struct Options {
  std::string message;
  std::string address = "localhost:50051";
  std::string api_key;  // empty: none
  std::string ca;       // a PEM file; empty: no TLS
  std::chrono::duration<double> deadline{60};
  std::uint32_t max_tokens = 512;
  int cancel_after = 0;  // pieces of text; 0: never
};

// Reads the command line, and the variables OCTAVO_ADDRESS, OCTAVO_API_KEY and
// OCTAVO_CA where it is silent. Ends the program with 2 where it is wrong, and
// with 0 after --help.
Options parse_options(int argc, char** argv);
