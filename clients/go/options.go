package main

import (
	"flag"
	"fmt"
	"os"
	"time"
)

const usage = `usage: octavo-chat [OPTION]... MESSAGE

Asks an Octavo server one thing and writes the answer as it comes.

`

// options say what to ask, and of whom.
type options struct {
	message     string
	address     string
	apiKey      string // empty: none
	ca          string // a PEM file; empty: no TLS
	deadline    time.Duration
	maxTokens   uint
	cancelAfter uint // pieces of text; 0: never
}

// parseOptions reads the command line, and the environment where it is silent.
// It ends the program with 2 where the command line is wrong.
func parseOptions() options {
	var o options
	var seconds float64
	flag.StringVar(&o.address, "address", variable("OCTAVO_ADDRESS", "localhost:50051"),
		"the server's `HOST:PORT`; $OCTAVO_ADDRESS")
	flag.StringVar(&o.apiKey, "api-key", "", "says who asks; default $OCTAVO_API_KEY, or nobody")
	flag.StringVar(&o.ca, "ca", variable("OCTAVO_CA", ""),
		"TLS, the server's authority in this PEM `file`; $OCTAVO_CA (default no TLS)")
	flag.Float64Var(&seconds, "deadline", 60, "give up after so many `seconds`")
	flag.UintVar(&o.maxTokens, "max-tokens", 512, "most tokens of the answer")
	flag.UintVar(&o.cancelAfter, "cancel-after", 0,
		"cancel the call after so many pieces of text (default never)")
	flag.Usage = func() {
		fmt.Fprint(flag.CommandLine.Output(), usage)
		flag.PrintDefaults()
	}
	flag.Parse()
	if o.apiKey == "" {
		o.apiKey = os.Getenv("OCTAVO_API_KEY") // no default, which --help would show
	}
	if flag.NArg() != 1 || seconds <= 0 || o.maxTokens == 0 {
		fmt.Fprintln(os.Stderr, "octavo-chat: one MESSAGE is needed, and numbers above 0")
		flag.Usage()
		os.Exit(wrongUsage)
	}
	o.message = flag.Arg(0)
	o.deadline = time.Duration(seconds * float64(time.Second))
	return o
}

func variable(name, otherwise string) string {
	if value := os.Getenv(name); value != "" {
		return value
	}
	return otherwise
}
