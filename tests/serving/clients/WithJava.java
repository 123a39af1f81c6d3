import java.io.ByteArrayInputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublisher;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.regex.Pattern;

/** java.net.http.HttpClient with its defaults, which offer HTTP/2 (h2c): completions and chat, whole and streamed. */
public class WithJava {
    private static final HttpClient CLIENT = HttpClient.newHttpClient();
    private static final String SAMPLING = ", \"max_tokens\": 24, \"seed\": 7";

    public static void main(String[] arguments) throws Exception {
        String url = arguments[0];
        String model = "\"model\": \"" + arguments[1] + "\", ";
        check(url + "/v1/completions", model + "\"prompt\": \"import os\"" + SAMPLING, "text");
        String messages = "\"messages\": [{\"role\": \"user\", \"content\": \"import os\"}]";
        check(url + "/v1/chat/completions", model + messages + SAMPLING, "content");
        System.out.println("completions and chat; whole, chunked, eight at once and streamed");
    }

    /** Fails unless all ways to send the body of `fields` give the same text, which stands in the JSON field `name`. */
    private static void check(String url, String fields, String name) throws Exception {
        String body = "{" + fields + "}";
        String whole = textOf(CLIENT.send(request(url, BodyPublishers.ofString(body)), BodyHandlers.ofString()), name);
        require(!whole.isEmpty(), "no text from " + url);

        byte[] bytes = body.getBytes(StandardCharsets.UTF_8);
        BodyPublisher chunked = BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(bytes));
        same(whole, textOf(CLIENT.send(request(url, chunked), BodyHandlers.ofString()), name), "chunked to " + url);

        List<CompletableFuture<HttpResponse<String>>> many = new ArrayList<>();
        for (int i = 0; i < 8; i++) {
            many.add(CLIENT.sendAsync(request(url, BodyPublishers.ofString(body)), BodyHandlers.ofString()));
        }
        for (CompletableFuture<HttpResponse<String>> one : many) {
            same(whole, textOf(one.get(), name), "eight at once to " + url);
        }

        HttpRequest streaming = request(url, BodyPublishers.ofString("{" + fields + ", \"stream\": true}"));
        var lines = CLIENT.send(streaming, BodyHandlers.ofLines());
        require(lines.statusCode() == 200, "status " + lines.statusCode() + " of a stream of " + url);
        StringBuilder streamed = new StringBuilder();
        List<String> events = lines.body().filter(line -> line.startsWith("data: ")).toList();
        for (String event : events) {
            streamed.append(valueOf(event, name));
        }
        same(whole, streamed.toString(), "streamed from " + url);
        require(events.get(events.size() - 1).equals("data: [DONE]"), "the stream has no [DONE]");
    }

    private static HttpRequest request(String url, BodyPublisher body) {
        return HttpRequest.newBuilder(URI.create(url)).header("content-type", "application/json").POST(body).build();
    }

    private static String textOf(HttpResponse<String> response, String name) {
        require(response.statusCode() == 200, response.statusCode() + " " + response.body());
        return valueOf(response.body(), name);
    }

    /** The string of the first field `name`, escapes as they stand in the JSON; empty if there is none. */
    private static String valueOf(String json, String name) {
        var found = Pattern.compile("\"" + name + "\":\\s*\"((?:[^\"\\\\]|\\\\.)*+)\"").matcher(json);
        return found.find() ? found.group(1) : "";
    }

    private static void same(String expected, String got, String where) {
        require(expected.equals(got), where + ": expected " + expected + ", got " + got);
    }

    private static void require(boolean holds, String otherwise) {
        if (!holds) {
            throw new AssertionError(otherwise);
        }
    }
}
