// An agent that nobody prepared for interception: one static file, a certificate store of its own, no proxy variables.
//
// It speaks Chat Completions over HTTPS, streamed, and has one tool, `run`. Whatever the environment says, it trusts the
// certificates in the file that it is given and nothing else, and connects to the provider's own address.
//
//	static-client CERTIFICATES TASK
package main

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"
)

const provider = "https://api.openai.com/v1/chat/completions"

type function struct {
	Name      string `json:"name"`
	Arguments string `json:"arguments"`
}

type toolCall struct {
	Index    int      `json:"index"`
	ID       string   `json:"id"`
	Type     string   `json:"type"`
	Function function `json:"function"`
}

type message struct {
	Role       string     `json:"role"`
	Content    string     `json:"content"`
	ToolCalls  []toolCall `json:"tool_calls,omitempty"`
	ToolCallID string     `json:"tool_call_id,omitempty"`
}

var tools = json.RawMessage(`[{"type": "function", "function": {"name": "run", "description": "Runs a shell command.",
	"parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}]`)

func main() {
	if len(os.Args) != 3 {
		fail("usage: static-client CERTIFICATES TASK")
	}
	client := clientTrusting(os.Args[1])
	history := []message{{Role: "system", Content: "Use the tool."}, {Role: "user", Content: os.Args[2]}}
	for {
		reply := ask(client, history)
		history = append(history, reply)
		if len(reply.ToolCalls) == 0 {
			fmt.Println(reply.Content)
			return
		}
		for _, call := range reply.ToolCalls {
			history = append(history, message{Role: "tool", ToolCallID: call.ID, Content: run(call)})
		}
	}
}

// clientTrusting is a client with the certificates of one file and a transport that reads no proxy variables.
func clientTrusting(file string) *http.Client {
	certificates, err := os.ReadFile(file)
	check(err)
	store := x509.NewCertPool()
	if !store.AppendCertsFromPEM(certificates) {
		fail(file + " holds no certificate")
	}
	return &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: store}}}
}

// ask posts the history and puts the streamed pieces of the answer together.
func ask(client *http.Client, history []message) message {
	body, err := json.Marshal(map[string]any{"model": "some-model", "stream": true, "messages": history, "tools": tools})
	check(err)
	request, err := http.NewRequest("POST", provider, bytes.NewReader(body))
	check(err)
	request.Header.Set("content-type", "application/json")
	request.Header.Set("authorization", "Bearer "+os.Getenv("OPENAI_API_KEY"))
	answer, err := client.Do(request)
	check(err)
	defer answer.Body.Close()
	if answer.StatusCode != 200 {
		fail("the provider answers " + answer.Status)
	}
	return joined(bufio.NewScanner(answer.Body))
}

func joined(lines *bufio.Scanner) message {
	lines.Buffer(nil, 1<<24)
	reply := message{Role: "assistant"}
	for lines.Scan() {
		data, found := strings.CutPrefix(lines.Text(), "data: ")
		if !found {
			continue
		}
		if data == "[DONE]" {
			return reply
		}
		var chunk struct {
			Choices []struct{ Delta message }
		}
		check(json.Unmarshal([]byte(data), &chunk))
		for _, choice := range chunk.Choices {
			reply.Content += choice.Delta.Content
			reply.ToolCalls = withPieces(reply.ToolCalls, choice.Delta.ToolCalls)
		}
	}
	fail("the stream ended without [DONE]")
	return reply
}

// withPieces adds streamed pieces to the calls that they belong to.
func withPieces(calls, pieces []toolCall) []toolCall {
	for _, piece := range pieces {
		if piece.Index == len(calls) {
			calls = append(calls, piece)
			continue
		}
		calls[piece.Index].Function.Arguments += piece.Function.Arguments
	}
	return calls
}

func run(call toolCall) string {
	var arguments struct{ Command string }
	check(json.Unmarshal([]byte(call.Function.Arguments), &arguments))
	output, err := exec.Command("/bin/sh", "-c", arguments.Command).CombinedOutput()
	check(err)
	return string(output)
}

func check(err error) {
	if err != nil {
		fail(err.Error())
	}
}

func fail(text string) {
	fmt.Fprintln(os.Stderr, "static-client: "+text)
	os.Exit(1)
}
