package octavo.chat;

import java.util.Optional;
import java.util.function.Predicate;

/**
 * What octavo-chat is asked to do, read from the command line.
 *
 * @param apiKey says who asks, if anybody
 * @param ca a PEM file; empty: no TLS
 * @param deadline seconds
 * @param cancelAfter pieces of text; 0: never
 */
record Options(
    String message,
    String address,
    Optional<String> apiKey,
    Optional<String> ca,
    double deadline,
    int maxTokens,
    int cancelAfter) {

  static final String USAGE =
      """
      usage: octavo-chat [OPTION]... MESSAGE

      Asks an Octavo server one thing and writes the answer as it comes.

        --address HOST:PORT  the server; default $OCTAVO_ADDRESS, or localhost:50051
        --api-key KEY        says who asks; default $OCTAVO_API_KEY, or nobody
        --ca FILE            TLS, the server's authority in PEM; default $OCTAVO_CA, or no TLS
        --deadline SECONDS   give up after this long; default 60
        --max-tokens N       most tokens of the answer; default 512
        --cancel-after N     cancel the call after N pieces of text
      """;

  /** The command line is wrong; the message says how. */
  static final class UsageException extends Exception {
    private static final long serialVersionUID = 1;

    UsageException(String message) {
      super(message);
    }
  }

  /** Reads the command line, and the environment where it is silent. */
  static Options parse(String[] arguments) throws UsageException {
    String message = null;
    String address = variable("OCTAVO_ADDRESS").orElse("localhost:50051");
    Optional<String> apiKey = variable("OCTAVO_API_KEY");
    Optional<String> ca = variable("OCTAVO_CA");
    double deadline = 60;
    int maxTokens = 512;
    int cancelAfter = 0;
    for (int i = 0; i < arguments.length; i++) {
      String argument = arguments[i];
      if (!argument.startsWith("-")) {
        if (message != null) {
          throw new UsageException("exactly one MESSAGE is needed");
        }
        message = argument;
        continue;
      }
      if (i + 1 == arguments.length) {
        throw new UsageException("cannot use " + argument);
      }
      String value = arguments[++i];
      switch (argument) {
        case "--address" -> address = value;
        case "--api-key" -> apiKey = Optional.of(value);
        case "--ca" -> ca = Optional.of(value);
        case "--deadline" -> deadline = positive(argument, value);
        case "--max-tokens" -> maxTokens = whole(argument, value);
        case "--cancel-after" -> cancelAfter = whole(argument, value);
        default -> throw new UsageException("cannot use " + argument);
      }
    }
    if (message == null) {
      throw new UsageException("exactly one MESSAGE is needed");
    }
    return new Options(message, address, apiKey, ca, deadline, maxTokens, cancelAfter);
  }

  private static Optional<String> variable(String name) {
    return Optional.ofNullable(System.getenv(name)).filter(Predicate.not(String::isEmpty));
  }

  private static double positive(String option, String text) throws UsageException {
    try {
      double number = Double.parseDouble(text);
      if (number > 0 && Double.isFinite(number)) {
        return number;
      }
    } catch (NumberFormatException error) {
      // said below
    }
    throw new UsageException(option + " takes a number above 0, not '" + text + "'");
  }

  private static int whole(String option, String text) throws UsageException {
    try {
      int number = Integer.parseInt(text);
      if (number > 0) {
        return number;
      }
    } catch (NumberFormatException error) {
      // said below
    }
    throw new UsageException(option + " takes a whole number above 0, not '" + text + "'");
  }
}
