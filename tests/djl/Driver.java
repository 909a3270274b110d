import ai.djl.engine.Engine;
import ai.djl.inference.Predictor;
import ai.djl.inference.streaming.ChunkedBytesSupplier;
import ai.djl.modality.Input;
import ai.djl.modality.Output;
import ai.djl.ndarray.BytesSupplier;
import ai.djl.repository.zoo.Criteria;
import ai.djl.repository.zoo.ZooModel;

import com.google.gson.Gson;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Base64;
import java.util.List;
import java.util.Map;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;

/**
 * Runs models on DJL's Python engine, with the threads of DJL Serving: one for the calls of each of a model's {@code
 * minWorkers} processes, others for the answers.
 *
 * <p>A line of standard input is a {@link Command}, a line of standard output an event, both in JSON. At the end of the
 * input all models are closed, and the process ends when no load hangs.
 */
public final class Driver {

    // DJL Serving's chunked_read_timeout, and the variable that it reads it from.
    private static final long CHUNK_TIMEOUT_S =
            Long.parseLong(System.getenv().getOrDefault("SERVING_CHUNKED_READ_TIMEOUT", "120"));
    private static final Gson GSON = new Gson();
    private static final ExecutorService READERS = Executors.newCachedThreadPool(Driver::daemon);
    private static final Map<String, Workers> WORKERS = new ConcurrentHashMap<>();

    /** {@code run}: load, predict (one call per request), batch (one call for all requests) or unload. */
    record Command(
            String run, String model, String folder, Map<String, String> options, List<Request> requests) {}

    /**
     * {@code body}: in Base64; null for a call without content. {@code chunks}: the client leaves after so many; 0: it
     * stays; -1: it reads nothing.
     */
    record Request(int id, String body, Map<String, String> headers, int chunks) {

        Input input() {
            Input input = new Input();
            headers.forEach(input::addProperty);
            if (body != null) {
                input.add("data", Base64.getDecoder().decode(body));
            }
            return input;
        }
    }

    /** A loaded model with its processes, and a thread for the calls of each. {@code free}: those without a call. */
    record Workers(
            ZooModel<Input, Output> model,
            List<Predictor<Input, Output>> all,
            BlockingQueue<Predictor<Input, Output>> free,
            ExecutorService calls) {

        void close() {
            all.forEach(Predictor::close);
            model.close();
            calls.shutdownNow();
        }
    }

    public static void main(String[] args) throws IOException {
        Engine.getEngine("Python"); // loads that begin together would race for it
        try (BufferedReader lines =
                new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8))) {
            for (String line = lines.readLine(); line != null; line = lines.readLine()) {
                run(GSON.fromJson(line, Command.class));
            }
        }
        WORKERS.values().forEach(Workers::close);
    }

    private static Thread daemon(Runnable task) {
        Thread thread = new Thread(task);
        thread.setDaemon(true);
        return thread;
    }

    private static void run(Command command) {
        switch (command.run) {
            case "load" -> new Thread(() -> load(command)).start();
            case "predict" -> command.requests.forEach(one -> call(command.model, List.of(one)));
            case "batch" -> call(command.model, command.requests);
            case "unload" -> new Thread(() -> unload(command.model)).start();
            default -> throw new IllegalArgumentException(command.run);
        }
    }

    private static void load(Command command) {
        try {
            ZooModel<Input, Output> model =
                    Criteria.builder()
                            .setTypes(Input.class, Output.class)
                            .optEngine("Python")
                            .optModelPath(Path.of(command.folder))
                            .optOptions(command.options)
                            .build()
                            .loadModel();
            List<Predictor<Input, Output>> all = new ArrayList<>();
            try {
                for (int i = model.intProperty("minWorkers", 1); i > 0; --i) {
                    all.add(model.newPredictor()); // each starts a process
                }
            } catch (Throwable e) {
                all.forEach(Predictor::close);
                model.close();
                throw e;
            }
            ExecutorService calls = Executors.newFixedThreadPool(all.size());
            WORKERS.put(command.model, new Workers(model, all, new LinkedBlockingQueue<>(all), calls));
            say(Map.of("model", command.model, "event", "loaded"));
        } catch (Throwable e) {
            say(Map.of("model", command.model, "event", "failed", "errors", messages(e)));
        }
    }

    private static void unload(String name) {
        WORKERS.remove(name).close();
        say(Map.of("model", name, "event", "unloaded"));
    }

    private static void call(String name, List<Request> requests) {
        Workers workers = WORKERS.get(name);
        workers.calls.submit(
                () -> {
                    List<Input> inputs = requests.stream().map(Request::input).toList();
                    Predictor<Input, Output> predictor = workers.free.take();
                    try {
                        List<Output> outputs = predictor.batchPredict(inputs);
                        for (int i = 0; i < outputs.size(); ++i) {
                            Request request = requests.get(i);
                            Output output = outputs.get(i);
                            READERS.submit(() -> read(request, output));
                        }
                    } catch (Throwable e) {
                        requests.forEach(one -> say(Map.of("id", one.id, "errors", messages(e))));
                    } finally {
                        workers.free.add(predictor);
                    }
                    return null;
                });
    }

    /** Tell what an HTTP client would see: status and headers go out with the first chunk, as they are then. */
    private static void read(Request request, Output output) {
        try {
            if (request.chunks < 0) {
                say(Map.of("id", request.id, "event", "left"));
                return;
            }
            BytesSupplier data = output.getData();
            if (!(data instanceof ChunkedBytesSupplier)) {
                head(request, output);
                chunk(request, data == null ? new byte[0] : data.getAsBytes());
            } else {
                ChunkedBytesSupplier supplier = (ChunkedBytesSupplier) data;
                for (int count = 0; supplier.hasNext(); ++count) {
                    if (count > 0 && count == request.chunks) {
                        say(Map.of("id", request.id, "event", "left"));
                        return;
                    }
                    byte[] chunk = supplier.nextChunk(CHUNK_TIMEOUT_S, TimeUnit.SECONDS);
                    if (count == 0) {
                        head(request, output);
                    }
                    chunk(request, chunk);
                }
            }
            say(Map.of("id", request.id, "event", "end"));
        } catch (Throwable e) {
            say(Map.of("id", request.id, "errors", messages(e)));
        }
    }

    private static void head(Request request, Output output) {
        String reason = String.valueOf(output.getMessage());
        Map<String, String> headers = output.getProperties();
        say(Map.of("id", request.id, "status", output.getCode(), "reason", reason, "headers", headers));
    }

    private static void chunk(Request request, byte[] data) {
        say(Map.of("id", request.id, "chunk", Base64.getEncoder().encodeToString(data)));
    }

    private static List<String> messages(Throwable error) {
        List<String> found = new ArrayList<>();
        for (Throwable e = error; e != null; e = e.getCause()) {
            found.add(e.getClass().getSimpleName() + ": " + e.getMessage());
        }
        return found;
    }

    private static synchronized void say(Map<String, ?> event) {
        System.out.println(GSON.toJson(event));
        System.out.flush();
    }
}
