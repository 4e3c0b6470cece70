// A running answer: what came of it so far, and its measures. Times are milliseconds of performance.now().

/** The run of an answer that is asked for now; `controller.abort()` ends it. */
export function startRun() {
  return {
    controller: new AbortController(),
    message: { role: "assistant", content: "", reasoning: "", state: "streaming", stats: null, error: "" },
    sent: performance.now(),
    first: 0, // when the first text came
    pieces: 0,
    timed: false, // the rate is the server's own
  };
}

/** What one chunk adds to the answer. */
export function take(run, chunk) {
  const { message } = run;
  const choice = chunk.choices?.[0];
  const text = choice?.delta?.content ?? "";
  const reasoning = choice?.delta?.reasoning_content ?? "";
  const now = performance.now();
  const stats = (message.stats ??= {});
  if (text || reasoning) {
    run.first ||= now;
    run.pieces += 1;
    if (text && message.reasoning && !message.content) stats.thought = (now - run.first) / 1000;
    message.content += message.content ? text : text.trimStart();
    message.reasoning += message.reasoning ? reasoning : reasoning.trimStart();
    stats.ttft = (run.first - run.sent) / 1000;
    if (!stats.exact) {
      // A piece is about a token; the server's count replaces it at the end.
      stats.tokens = run.pieces;
      if (now > run.first) stats.rate = ((run.pieces - 1) * 1000) / (now - run.first);
    }
  }
  if (choice?.finish_reason) stats.finish = choice.finish_reason;
  if (chunk.usage) {
    stats.exact = true;
    stats.tokens = chunk.usage.completion_tokens;
    stats.prompt = chunk.usage.prompt_tokens;
    stats.cached = chunk.usage.prompt_tokens_details?.cached_tokens;
    if (!run.timed && run.first && now > run.first) stats.rate = ((stats.tokens - 1) * 1000) / (now - run.first);
  }
  if (chunk.timings?.predicted_per_second) {
    run.timed = true; // the server's own measure, without the network
    stats.rate = chunk.timings.predicted_per_second;
  }
}
