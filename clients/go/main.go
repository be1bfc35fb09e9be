// Command octavo-chat asks an Octavo server one thing and writes the answer as
// it comes.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "octavo-chat/octavov1"
)

const (
	failure    = 1
	wrongUsage = 2
	// As grpcurl has it: 64 and the status's number, so that scripts can tell.
	statusOffset = 64
)

func main() {
	err := chat(parseOptions())
	if err == nil {
		return
	}
	if s, ok := status.FromError(err); ok {
		fmt.Fprintf(os.Stderr, "octavo-chat: %v: %s\n", s.Code(), s.Message())
		os.Exit(statusOffset + int(s.Code()))
	}
	fmt.Fprintf(os.Stderr, "octavo-chat: %v\n", err)
	os.Exit(failure)
}

// chat asks, and writes the answer to stdout and what it took to stderr.
func chat(o options) error {
	conn, err := connect(o)
	if err != nil {
		return err
	}
	defer conn.Close()

	ctx, cancel := context.WithTimeout(context.Background(), o.deadline)
	defer cancel()
	if o.apiKey != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+o.apiKey)
	}
	stream, err := pb.NewGenerationServiceClient(conn).Generate(ctx, request(o))
	if err != nil {
		return err
	}

	var pieces uint
	for {
		response, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			if pieces > 0 {
				fmt.Println()
			}
			return err
		}
		switch event := response.Event.(type) {
		case *pb.GenerateResponse_Delta:
			fmt.Print(event.Delta.Text)
			if pieces++; pieces == o.cancelAfter {
				fmt.Println()
				fmt.Fprintf(os.Stderr, "cancelled after %d pieces\n", pieces)
				return nil // which cancels the context, and with it the call
			}
		case *pb.GenerateResponse_Finished:
			fmt.Println()
			usage := event.Finished.Usage
			fmt.Fprintf(os.Stderr, "%v: %d prompt tokens (%d cached), %d output tokens\n",
				event.Finished.Reason, usage.PromptTokens, usage.CachedTokens, usage.OutputTokens)
		}
	}
}

func connect(o options) (*grpc.ClientConn, error) {
	if o.ca == "" {
		return grpc.Dial(o.address, grpc.WithInsecure())
	}
	tls, err := credentials.NewClientTLSFromFile(o.ca, "")
	if err != nil {
		return nil, err
	}
	return grpc.Dial(o.address, grpc.WithTransportCredentials(tls))
}

func request(o options) *pb.GenerateRequest {
	greedy, maxTokens := float32(0), uint32(o.maxTokens)
	message := &pb.ChatMessage{Role: "user", Content: o.message}
	return &pb.GenerateRequest{
		Prompt: &pb.GenerateRequest_Chat{
			Chat: &pb.ChatPrompt{Messages: []*pb.ChatMessage{message}},
		},
		Sampling: &pb.SamplingParams{Temperature: &greedy},
		Stop:     &pb.StopConditions{MaxTokens: &maxTokens},
	}
}
