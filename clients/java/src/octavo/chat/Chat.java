package octavo.chat;

import io.grpc.ChannelCredentials;
import io.grpc.Context;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import io.grpc.stub.MetadataUtils;
import java.io.File;
import java.io.IOException;
import java.util.Iterator;
import java.util.List;
import java.util.concurrent.TimeUnit;
import octavo.v1.Generation.ChatMessage;
import octavo.v1.Generation.ChatPrompt;
import octavo.v1.Generation.Finished;
import octavo.v1.Generation.GenerateRequest;
import octavo.v1.Generation.GenerateResponse;
import octavo.v1.GenerationServiceGrpc;
import octavo.v1.GenerationServiceGrpc.GenerationServiceBlockingStub;
import octavo.v1.Sampling.SamplingParams;
import octavo.v1.Sampling.StopConditions;

/** Asks an Octavo server one thing and writes the answer as it comes. */
public final class Chat {
  private static final int FAILURE = 1;
  private static final int WRONG_USAGE = 2;
  /** As grpcurl has it: 64 and the status's number, so that scripts can tell. */
  private static final int STATUS_OFFSET = 64;

  private static final Metadata.Key<String> AUTHORIZATION =
      Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);

  private Chat() {}

  /** Runs the program. */
  public static void main(String[] arguments) {
    if (List.of(arguments).contains("--help")) {
      System.out.print(Options.USAGE);
      return;
    }
    try {
      chat(Options.parse(arguments));
    } catch (Options.UsageException error) {
      System.err.println("octavo-chat: " + error.getMessage() + "\n\n" + Options.USAGE);
      System.exit(WRONG_USAGE);
    } catch (StatusRuntimeException error) {
      Status status = error.getStatus();
      String cause = status.getCause() == null ? "" : " (" + status.getCause().getMessage() + ")";
      System.err.println(
          "octavo-chat: " + status.getCode() + ": " + status.getDescription() + cause);
      System.exit(STATUS_OFFSET + status.getCode().value());
    } catch (IOException | UnsupportedOperationException error) {
      System.err.println("octavo-chat: " + error.getMessage()); // the latter: TLS without ALPN
      System.exit(FAILURE);
    }
  }

  /** Asks, and writes the answer to stdout and what it took to stderr. */
  private static void chat(Options options) throws IOException {
    ManagedChannel channel =
        Grpc.newChannelBuilder(options.address(), credentials(options)).build();
    // Whatever way this ends, leaving the context cancels the call.
    try (Context.CancellableContext context = Context.current().withCancellation()) {
      Context before = context.attach();
      try {
        read(stub(channel, options).generate(request(options)), options);
      } finally {
        context.detach(before);
      }
    } finally {
      channel.shutdown();
    }
  }

  private static void read(Iterator<GenerateResponse> stream, Options options) {
    int pieces = 0;
    try {
      while (stream.hasNext()) {
        GenerateResponse response = stream.next();
        if (response.hasDelta()) {
          System.out.print(response.getDelta().getText());
          System.out.flush();
          pieces++;
          if (pieces == options.cancelAfter()) {
            System.out.println();
            System.err.println("cancelled after " + pieces + " pieces");
            return;
          }
        } else if (response.hasFinished()) {
          System.out.println();
          report(response.getFinished());
        }
      }
    } catch (StatusRuntimeException error) {
      if (pieces > 0) {
        System.out.println();
      }
      throw error;
    }
  }

  private static ChannelCredentials credentials(Options options) throws IOException {
    if (options.ca().isEmpty()) {
      return InsecureChannelCredentials.create();
    }
    return TlsChannelCredentials.newBuilder().trustManager(new File(options.ca().get())).build();
  }

  private static GenerationServiceBlockingStub stub(ManagedChannel channel, Options options) {
    Metadata metadata = new Metadata();
    options.apiKey().ifPresent(key -> metadata.put(AUTHORIZATION, "Bearer " + key));
    return GenerationServiceGrpc.newBlockingStub(channel)
        .withInterceptors(MetadataUtils.newAttachHeadersInterceptor(metadata))
        .withDeadlineAfter((long) (options.deadline() * 1e9), TimeUnit.NANOSECONDS);
  }

  private static GenerateRequest request(Options options) {
    ChatMessage message =
        ChatMessage.newBuilder().setRole("user").setContent(options.message()).build();
    return GenerateRequest.newBuilder()
        .setChat(ChatPrompt.newBuilder().addMessages(message))
        .setSampling(SamplingParams.newBuilder().setTemperature(0)) // greedy: always the same
        .setStop(StopConditions.newBuilder().setMaxTokens(options.maxTokens()))
        .build();
  }

  private static void report(Finished finished) {
    System.err.printf(
        "%s: %d prompt tokens (%d cached), %d output tokens%n",
        finished.getReason(),
        finished.getUsage().getPromptTokens(),
        finished.getUsage().getCachedTokens(),
        finished.getUsage().getOutputTokens());
  }
}
