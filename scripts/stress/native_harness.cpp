// Random models and batches through the native kernels, against a plain loop in double precision.
//
// scripts/stress/native.py compiles this with sanitizers and runs it; it needs neither Python nor torch.
//
//     native_harness SECONDS SEED [CASES]
//
// Prints one line: how many cases ran, and the largest error of each dtype, relative to the largest number of the
// outputs, and a hash of the outputs that are the same on every processor.  The first case that is wrong is described
// on standard error, and the status is 1.
#include "native.cpp"

#include <chrono>
#include <cstdio>
#include <memory>
#include <random>
#include <string>

namespace {

using Random = std::mt19937_64;
using Doubles = std::vector<double>;

long draw(Random& random, long low, long high) { return std::uniform_int_distribution<long>(low, high)(random); }
long pick(Random& random, std::initializer_list<long> choices) {
    return choices.begin()[draw(random, 0, long(choices.size()) - 1)];
}

std::vector<float> normal(Random& random, long count, float mean, float deviation) {
    std::vector<float> values(count);
    for (auto& value : values) {  // the sum of four numbers, alike on every processor, as the library's is not
        const uint64_t bits = random();
        long sum = 0;
        for (int shift = 0; shift < 64; shift += 16) sum += long(bits >> shift & 0xffff);
        value = mean + deviation * (float(sum - 2 * 0xffff) / 37837);  // whose standard deviation this is
    }
    return values;
}

uint32_t bits_of(float x) { return load_as<uint32_t>(&x); }

BFloat16 to_bfloat16(float x) {
    const uint32_t bits = bits_of(x);
    return BFloat16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// A weight as a user has it, and as the kernels do.  Each buffer is as long as the kernels may read, and no longer,
// so that the address sanitizer sees what they read beyond.
struct Weight {
    long outputs, inputs;
    std::vector<float> values, bias;
    std::vector<uint32_t> words;
    std::vector<float> padded_bias, scales, sums, factors;

    // `beside` reads the same inputs, and so has the same factors.
    Weight(Random& random, long dtype, long outputs_, long inputs_, long threads, const Weight* beside = nullptr)
        : outputs(outputs_), inputs(inputs_) {
        const long per_word = dtype == float32 ? 1 : dtype == bfloat16 ? 2 : 4, padded = round_up(outputs, GROUP);
        values = normal(random, outputs * inputs, 0, 1 / std::sqrt(std::max(1.0f, float(inputs))));
        bias = normal(random, outputs, 0, 0.2f);
        padded_bias = bias;
        padded_bias.resize(padded);
        words.resize(padded * divide_up(inputs, per_word), 0xdeadbeef);
        std::vector<float> packed = values;
        if (dtype == int8) {
            scales.resize(padded, NAN);
            sums.resize(padded, 1e30f);
            if (beside ? !beside->factors.empty() : draw(random, 0, 1)) divide_by_factors(random, packed, beside);
        }
        char message[512];
        if (bertlite_pack(dtype, packed.data(), outputs, inputs, words.data(), scales.data(), sums.data(), threads,
                          message, sizeof message))
            throw std::runtime_error(message);
    }

    // Let the kernels multiply inputs by factors, by which the weight is divided.
    void divide_by_factors(Random& random, std::vector<float>& weight, const Weight* beside) {
        for (long i = 0; i < inputs; i++) {
            const float shrink = i < inputs / ROTATED * ROTATED ? 8 : 1;
            const float factor = beside ? beside->factors[i] * shrink : float(draw(random, 2, 11)) / 5;
            factors.push_back(factor / shrink);
            for (long row = 0; row < outputs; row++) weight[row * inputs + i] /= factor;
        }
        factors.resize(round_up(inputs, LANES));
    }

    Matrix matrix() const {
        return {words.data(), padded_bias.data(), scales.data(), sums.data(), outputs, inputs,
                factors.empty() ? nullptr : factors.data()};
    }

    Doubles matmul(const Doubles& x, long rows) const {  // (rows, inputs) -> (rows, outputs)
        Doubles y(rows * outputs);
        for (long row = 0; row < rows; row++)
            for (long output = 0; output < outputs; output++) {
                double sum = bias[output];
                for (long i = 0; i < inputs; i++) sum += x[row * inputs + i] * double(values[output * inputs + i]);
                y[row * outputs + output] = sum;
            }
        return y;
    }
};

struct NormWeights {
    std::vector<float> weight, bias;

    NormWeights(Random& random, long D) : weight(normal(random, D, 1, 0.2f)), bias(normal(random, D, 0, 0.2f)) {}
    Norm norm() const { return {weight.data(), bias.data()}; }
};

// How a model differs from a BERT: as ModernBERT does, or in one of these ways.
struct Kind {
    bool norms_first = false, gated = false, rotates = false;
    long angle_count = 0, angle_size = 0;
};

struct LayerWeights {
    Weight qkv, output, up, down;
    NormWeights attention_norm, output_norm;
    long head_count, reach, dtype;      // positions between which there is a distance; 0 for absolute positions
    std::unique_ptr<Weight> distances, key_distances;  // as vectors (2 reach - 1, H),
    bool distances_of_keys = false;
    std::vector<float> distance_bias;  // or as numbers (N, 2 reach - 1)
    std::vector<float> rows;           // or as vectors of each head, (N, table, H), that distances share
    long table = 0;
    std::unique_ptr<Weight> factor;  // of gated neurons
    std::unique_ptr<NormWeights> input_norm;
    std::vector<float> angles;  // (angle_count, angle_size): cosines, then sines, of each pair
    long window = -1;

    LayerWeights(Random& random, long dtype_, long D, long H, long N, long I, long reach_, long threads,
                 const Kind& kind_)
        : qkv(random, dtype_, 3 * N * H, D, threads),
          output(random, dtype_, D, N * H, threads),
          up(random, dtype_, I, D, threads),
          down(random, dtype_, D, I, threads),
          attention_norm(random, D),
          output_norm(random, D),
          head_count(N),
          reach(reach_),
          dtype(dtype_) {
        const long kind = reach ? draw(random, 0, 2) : -1, type = std::min(dtype, long(bfloat16));
        if (kind == 0) {
            distances = std::make_unique<Weight>(random, type, 2 * reach - 1, H, threads);
            distances_of_keys = draw(random, 0, 1);
        } else if (kind == 1) {
            for (long i = 0, row = 0, last = 2 * draw(random, 1, 90); i <= last; i++, row += draw(random, 0, 3) % 3)
                rows.push_back(row);
            table = round_up(long(rows.back()) + 1, GROUP);
            const long which = draw(random, 0, 2);
            if (which < 2) distances = std::make_unique<Weight>(random, type, N * table, H, threads);
            if (which > 0) key_distances = std::make_unique<Weight>(random, type, N * table, H, threads);
        } else if (kind == 2) {
            distance_bias = normal(random, N * (2 * reach - 1), 0, 1);
        }
        if (kind_.gated) factor = std::make_unique<Weight>(random, dtype, I, D, threads, &up);
        if (kind_.norms_first && draw(random, 0, 1)) input_norm = std::make_unique<NormWeights>(random, D);
        if (kind_.rotates) {
            if (draw(random, 0, 1)) window = draw(random, 0, 40);
            for (long place = 0; place < kind_.angle_count; place++)
                for (long i = 0; i < kind_.angle_size; i++) {
                    const double power = -2.0 * (i % (kind_.angle_size / 2)) / kind_.angle_size;
                    const double angle = place * std::pow(100.0, power);
                    angles.push_back(float(i < kind_.angle_size / 2 ? std::cos(angle) : std::sin(angle)));
                }
        }
    }

    // What a query and a key are moved by, d = zero - query + key, to their score before it is scaled, and after.
    double product(const double* query, const double* key, long H, long n, long d) const {
        double sum = 0;
        long row = d;
        if (!rows.empty()) {
            const long own = long(rows.size() - 1) / 2;
            row = n * table + long(rows[std::clamp(own - (reach - 1 - d), 0L, 2 * own)]);
        }
        for (long h = 0; h < H; h++) {
            if (distances) sum += query[h] * double(distances->values[row * H + h]);
            if (distances_of_keys) sum += key[h] * double(distances->values[row * H + h]);
            if (key_distances) sum += key[h] * double(key_distances->values[row * H + h]);
        }
        return sum;
    }
    Matrix matrix_of(const std::unique_ptr<Weight>& vectors) const {
        return vectors ? vectors->matrix()
                       : Matrix{nullptr, nullptr, nullptr, nullptr, std::max(0L, 2 * reach - 1), 0, nullptr};
    }
    double added(long n, long d) const { return distance_bias.empty() ? 0 : distance_bias[n * (2 * reach - 1) + d]; }

    Layer layer() const {
        return {sizeof(Layer),
                qkv.matrix(),
                output.matrix(),
                up.matrix(),
                down.matrix(),
                attention_norm.norm(),
                output_norm.norm(),
                head_count,
                matrix_of(distances),
                matrix_of(distances_of_keys ? distances : key_distances),
                distance_bias.empty() ? nullptr : distance_bias.data(),
                rows.empty() ? nullptr : rows.data(),
                long(rows.size()) / 2,
                dtype,
                factor ? factor->matrix() : Matrix{},
                angles.empty() ? nullptr : angles.data(),
                window,
                input_norm ? input_norm->norm() : Norm{}};
    }
};

double activate(long which, double x) {
    const double tanh_of = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
    switch (static_cast<Activation>(which)) {
        case Activation::identity: return x;
        case Activation::relu: return x > 0 ? x : 0;
        case Activation::gelu: return x * std::erfc(-x / std::sqrt(2.0)) / 2;
        case Activation::gelu_tanh: return x * (1 + std::tanh(tanh_of)) / 2;
        case Activation::silu: return x / (1 + std::exp(-x));
        case Activation::quick_gelu: return x / (1 + std::exp(-1.702 * x));
        case Activation::tanh: return std::tanh(x);
        case Activation::sigmoid: return 1 / (1 + std::exp(-x));
    }
    return NAN;
}

// One model, one batch, and what the kernels wrote.
struct Case {
    std::string description;
    long dtype, D, H, N, threads;
    Model model{};
    Batch batch{};
    std::vector<LayerWeights> weights;
    std::vector<Layer> layers;
    std::vector<long> starts;
    std::vector<float> hidden, output, states, bias;
    std::vector<BFloat16> hidden16, output16, states16;
    std::vector<uint8_t> has_keys;
    std::vector<std::vector<float>> gates, probabilities;
    std::vector<const float*> gate_pointers;
    std::vector<float*> probability_pointers;
    bool same_length = false;
    bool same_everywhere;  // whether outputs are the same on every processor
    Kind kind;
    std::vector<int64_t> places;

    Case(Random& random, long threads_) : threads(threads_) {
        dtype = draw(random, 0, 2);
        same_everywhere = dtype != bfloat16;
        const bool mixes = dtype == int8 && draw(random, 0, 1);  // layers of different dtypes
        H = pick(random, {16, 32, 48, 64, 80, 128});
        N = draw(random, 1, 3);
        D = N * H;
        const long L = draw(random, 0, 3), reach = pick(random, {0, 0, 130, 133});
        model.size = sizeof(Model);
        batch.size = sizeof(Batch);
        model.activation = draw(random, 0, 7);
        model.epsilon = 1e-12;
        model.score_scale = 1 / std::sqrt(double(H));
        model.rotated = 1;  // as bertlite_pack packs
        kind = {draw(random, 0, 2) == 0, draw(random, 0, 2) == 0, !reach && draw(random, 0, 1), 130,
                2 * draw(random, 1, H / 2)};
        model.norms_first = kind.norms_first;
        model.angle_count = kind.angle_count;
        model.angle_size = kind.angle_size;
        description = "dtype " + std::to_string(dtype) + ", H " + std::to_string(H) + ", N " + std::to_string(N) +
                      ", activation " + std::to_string(model.activation) + ", layers (heads, neurons)";
        for (long layer = 0; layer < L; layer++) {
            const long heads = pick(random, {0, 1, N, N}), neurons = pick(random, {0, 1, 37, 64, 100, 4 * D + 3});
            const long own = mixes ? pick(random, {int8, float32, bfloat16}) : dtype;
            same_everywhere &= own != bfloat16;
            weights.emplace_back(random, own, D, H, heads, neurons, reach, draw(random, 1, 3), kind);
            const char* relative = !reach ? "" : !weights.back().distance_bias.empty() ? ", bias" : ", distances";
            description += " (" + std::to_string(heads) + ", " + std::to_string(neurons) + relative +
                           (mixes ? ", dtype " + std::to_string(own) : "") + ")";
        }
        description += std::string(kind.norms_first ? ", norms first" : "") + (kind.gated ? ", gated" : "") +
                       (kind.rotates ? ", rotary" : "");
        for (const auto& each : weights) layers.push_back(each.layer());
        model.layers = layers.data();
        model.layer_count = L;
        model.hidden_size = D;
        model.head_size = H;
        draw_batch(random);
    }

    long length(long sequence) const { return starts[sequence + 1] - starts[sequence]; }

    void draw_batch(Random& random) {
        const long B = draw(random, 1, 5), L = model.layer_count, longest = pick(random, {1, 2, 7, 17, 40, 66, 130});
        same_length = draw(random, 0, 1);
        starts = {0};
        for (long i = 0; i < B; i++)
            starts.push_back(starts.back() + (same_length ? longest : draw(random, 1, longest)));
        const long T = starts.back();
        batch.tokens = T;
        batch.sequences = B;
        batch.starts = starts.data();
        batch.is_bfloat16 = dtype == bfloat16 && draw(random, 0, 3);
        batch.first_only = draw(random, 0, 2) == 0;
        hidden = normal(random, T * D, 0, 1);
        const long rows = batch.first_only ? B : T;
        const bool keep = draw(random, 0, 1);
        if (batch.is_bfloat16) {
            for (auto& x : hidden) x = to_float(hidden16.emplace_back(to_bfloat16(x)));
            output16.resize(rows * D, 0x7fc0);
            states16.resize(keep ? L * T * D : 0);
            batch.hidden = hidden16.data();
            batch.output = output16.data();
            batch.states = keep ? states16.data() : nullptr;
        } else {
            output.resize(rows * D, NAN);
            states.resize(keep ? L * T * D : 0);
            batch.hidden = hidden.data();
            batch.output = output.data();
            batch.states = keep ? states.data() : nullptr;
        }
        if (kind.rotates && draw(random, 0, 1)) {
            for (long i = 0; i < T; i++) places.push_back(draw(random, 0, kind.angle_count - 1));
            batch.places = places.data();
        }
        if (same_length && draw(random, 0, 1)) draw_masks(random, B, longest);
        if (draw(random, 0, 1)) draw_gates(random, T);
        if (same_length && !batch.first_only && draw(random, 0, 1)) {
            for (const auto& layer : weights)
                probabilities.emplace_back(B * layer.head_count * longest * longest, NAN);
            for (auto& each : probabilities) probability_pointers.push_back(each.data());
            batch.probabilities = probability_pointers.data();
        }
        description += ", threads " + std::to_string(threads) + ", lengths";
        for (long i = 0; i < B; i++) description += " " + std::to_string(length(i));
        description += std::string(batch.bias ? ", bias" : "") + (batch.has_keys ? ", has_keys" : "") +
                       (batch.gates ? ", gates" : "") + (batch.states ? ", states" : "") +
                       (batch.probabilities ? ", probabilities" : "") + (batch.first_only ? ", first_only" : "") +
                       (batch.is_bfloat16 ? ", bfloat16" : "");
    }

    void draw_masks(Random& random, long B, long S) {
        // heads may differ by layer, so a mask that differs by head has room for N
        const long sizes[3] = {draw(random, 0, 1) ? B : 1, draw(random, 0, 1) ? N : 1, draw(random, 0, 1) ? S : 1};
        bias = normal(random, sizes[0] * sizes[1] * sizes[2] * S, 0, 1);
        for (long row = 0; row < sizes[0] * sizes[1] * sizes[2]; row++) {
            for (long key = 0; key < S; key++)
                if (draw(random, 0, 2) == 0) bias[row * S + key] = -INFINITY;
            bias[row * S + draw(random, 0, S - 1)] = 0;  // a query without a key has has_keys
        }
        batch.bias = bias.data();
        const long strides[3] = {sizes[1] * sizes[2] * S, sizes[2] * S, S};
        for (int i = 0; i < 3; i++) batch.bias_strides[i] = sizes[i] == 1 ? 0 : strides[i];
        if (draw(random, 0, 1)) {
            has_keys.resize(sizes[0] * sizes[1] * sizes[2]);
            for (auto& each : has_keys) each = draw(random, 0, 3) > 0;
            batch.has_keys = has_keys.data();
            for (int i = 0; i < 3; i++) batch.has_keys_strides[i] = batch.bias_strides[i] / S;
        }
    }

    void draw_gates(Random& random, long T) {
        batch.gates_each_token = draw(random, 0, 1);
        for (const auto& layer : weights)
            gates.push_back(normal(random, (batch.gates_each_token ? T : 1) * layer.head_count, 1, 0.5f));
        for (const auto& each : gates) gate_pointers.push_back(each.data());
        batch.gates = gate_pointers.data();
    }

    void run() {
        char message[512];
        if (bertlite_run(true, &model, &batch, threads, message, sizeof message))
            throw std::runtime_error(message);
    }

    // Add the bits of the outputs to a hash.
    void hash(uint64_t& of_all) const {
        for (float each : output) of_all = (of_all ^ bits_of(each)) * 0x100000001b3;
    }

    double found(long i) const { return batch.is_bfloat16 ? to_float(output16[i]) : output[i]; }
    double found_state(long i) const { return batch.is_bfloat16 ? to_float(states16[i]) : states[i]; }

    // The largest error of outputs, states and probabilities, relative to the largest number of each.
    double error() const {
        Doubles x(hidden.begin(), hidden.end());
        double worst = 0;
        const long T = batch.tokens;
        for (long i = 0; i < model.layer_count; i++) {
            if (batch.states) worst = std::max(worst, differ(x, [&](long j) { return found_state(i * T * D + j); }));
            x = run_layer(i, x, worst);
        }
        if (batch.first_only) {
            Doubles firsts;
            for (long i = 0; i < batch.sequences; i++)
                firsts.insert(firsts.end(), x.begin() + starts[i] * D, x.begin() + (starts[i] + 1) * D);
            x = firsts;
        }
        return std::max(worst, differ(x, [&](long j) { return found(j); }));
    }

   private:
    template <class Found>
    static double differ(const Doubles& wanted, Found at) {
        double largest = 1e-6, largest_error = 0;
        for (long i = 0; i < long(wanted.size()); i++) {
            largest = std::max(largest, std::fabs(wanted[i]));
            const double error = std::fabs(at(i) - wanted[i]);
            if (!(error <= largest_error)) largest_error = std::isnan(error) ? INFINITY : error;
        }
        return largest_error / largest;
    }

    Doubles run_layer(long index, const Doubles& x, double& worst) const {
        const LayerWeights& layer = weights[index];
        const long T = batch.tokens, width = layer.head_count * H;
        const NormWeights* before = index ? &weights[index - 1].output_norm : layer.input_norm.get();
        const bool first = kind.norms_first;
        Doubles heads = layer.qkv.matmul(first && before ? normalise(x, *before) : x, T), context(T * width);
        Doubles probabilities_wanted;
        if (kind.rotates) rotate(layer, heads);
        for (long sequence = 0; sequence < batch.sequences; sequence++)
            for (long n = 0; n < layer.head_count; n++)
                for (long query = 0; query < length(sequence); query++)
                    attend_one(index, sequence, n, query, heads, context, probabilities_wanted);
        if (batch.probabilities && !probabilities_wanted.empty())
            worst = std::max(worst, differ(probabilities_wanted, [&](long j) { return probabilities[index][j]; }));

        // The sums go on normalised in a BERT; if norms come first only the matmuls, and the output, are.
        Doubles sum = add(layer.output.matmul(context, T), x), y = normalise(sum, layer.attention_norm);
        Doubles wide = layer.up.matmul(y, T);
        for (auto& each : wide) each = activate(model.activation, each);
        if (layer.factor) {
            const Doubles factors = layer.factor->matmul(y, T);
            for (size_t i = 0; i < wide.size(); i++) wide[i] *= factors[i];
        }
        sum = add(layer.down.matmul(wide, T), first ? sum : y);
        return first && index + 1 < model.layer_count ? sum : normalise(sum, layer.output_norm);
    }

    // Rotate queries and keys by the angles of their positions.
    void rotate(const LayerWeights& layer, Doubles& heads) const {
        const long width = layer.head_count * H, half = kind.angle_size / 2;
        for (long sequence = 0; sequence < batch.sequences; sequence++)
            for (long token = starts[sequence]; token < starts[sequence + 1]; token++) {
                const long place = batch.places ? batch.places[token] : token - starts[sequence];
                const float* angles = layer.angles.data() + place * kind.angle_size;
                for (long head = 0; head < 2 * layer.head_count; head++)
                    for (long i = 0; i < half; i++) {
                        double* x = heads.data() + token * 3 * width + head * H + i;
                        const double one = x[0], other = x[half], cosine = angles[i], sine = angles[half + i];
                        x[0] = one * cosine - other * sine;
                        x[half] = other * cosine + one * sine;
                    }
            }
    }

    void attend_one(long index, long sequence, long n, long query, const Doubles& heads, Doubles& context,
                    Doubles& probabilities_wanted) const {
        const long N_left = weights[index].head_count, width = N_left * H, keys = length(sequence),
                   start = starts[sequence];
        Doubles scores(keys);
        double largest = -INFINITY, total = 0;
        for (long key = 0; key < keys; key++) {
            const double* q = heads.data() + (start + query) * 3 * width + n * H;
            const double* k = heads.data() + (start + key) * 3 * width + width + n * H;
            const long distance = weights[index].reach - 1 - query + key;
            double sum = weights[index].product(q, k, H, n, distance);
            for (long h = 0; h < H; h++) sum += q[h] * k[h];
            scores[key] = sum / std::sqrt(double(H)) + weights[index].added(n, distance);
            if (batch.bias)
                scores[key] += batch.bias[sequence * batch.bias_strides[0] + n * batch.bias_strides[1] +
                                          query * batch.bias_strides[2] + key];
            const long window = weights[index].window;
            if (window >= 0 && std::abs(query - key) > window) scores[key] = -INFINITY;
            largest = std::max(largest, scores[key]);
        }
        for (auto& score : scores) total += score = largest == -INFINITY ? 0 : std::exp(score - largest);
        double factor = total ? 1 / total : 0;  // a mask may forbid all of a window
        if (batch.has_keys && !batch.has_keys[sequence * batch.has_keys_strides[0] + n * batch.has_keys_strides[1] +
                                              query * batch.has_keys_strides[2]])
            factor = 0;
        if (batch.gates) factor *= gates[index][(batch.gates_each_token ? (start + query) * N_left : 0) + n];
        for (auto& score : scores) probabilities_wanted.push_back(score *= factor);
        for (long h = 0; h < H; h++) {
            double sum = 0;
            for (long key = 0; key < keys; key++)
                sum += scores[key] * heads[(start + key) * 3 * width + 2 * width + n * H + h];
            context[(start + query) * width + n * H + h] = sum;
        }
    }

    static Doubles add(Doubles y, const Doubles& residual) {
        for (size_t i = 0; i < y.size(); i++) y[i] += residual[i];
        return y;
    }

    Doubles normalise(Doubles y, const NormWeights& norm) const {
        for (long row = 0; row < batch.tokens; row++) {
            double mean = 0, variance = 0;
            for (long i = 0; i < D; i++) mean += y[row * D + i] / D;
            for (long i = 0; i < D; i++) variance += std::pow(y[row * D + i] - mean, 2) / D;
            for (long i = 0; i < D; i++)
                y[row * D + i] = (y[row * D + i] - mean) / std::sqrt(variance + model.epsilon) * norm.weight[i] +
                                 norm.bias[i];
        }
        return y;
    }
};

// The largest error of a function of vectors over a range, each divided by relative_to of the truth.
template <class Function, class Truth, class Scale>
double error_of(float from, float to, Function function, Truth truth, Scale relative_to) {
    double worst = 0;
    for (long i = 0; i < 20000; i += LANES) {
        float x[LANES], y[LANES];
        for (long j = 0; j < LANES; j++) x[j] = from + (to - from) * (i + j) / 20000;
        store(y, function(load(x)));
        for (long j = 0; j < LANES; j++)
            worst = std::max(worst, std::fabs(y[j] - truth(x[j])) / relative_to(truth(x[j])));
    }
    return worst;
}

// Whether the functions with fewer terms are as near as functions.h says.
bool rounded_functions_are_near() {
    const auto power = [](double x) { return std::exp2(x); };
    const auto gelu_of = [](double x) { return activate(long(Activation::gelu), x); };
    const auto beyond = [](double x) { return std::max(x, 0.0); };
    const auto itself = [](double y) { return y; };
    const auto one = [](double) { return 1.0; };
    const auto rounded_gelu = [](Vector x) { return gelu<true>(x); };  // which is inlined everywhere
    return error_of(-125, 126, exp2<true>, power, itself) < 8e-5 &&
           error_of(-125, 126, exp2<false>, power, itself) < 2.5e-7 &&
           error_of(-4, 4, rounded_gelu, gelu_of, one) < 1.4e-4 && error_of(4, 300, rounded_gelu, beyond, one) == 0 &&
           error_of(-300, -4, rounded_gelu, beyond, one) == 0;
}

}  // namespace

int main(int count, char** arguments) {
    if (count < 3) {
        std::fprintf(stderr, "usage: native_harness SECONDS SEED [CASES]\n");
        return 2;
    }
    const double seconds = std::atof(arguments[1]);
    const unsigned long seed = std::strtoul(arguments[2], nullptr, 10);
    const long cases = count > 3 ? std::atol(arguments[3]) : -1;
    // relative to the largest number: float32 rounds at 6e-8, bfloat16 at 4e-3, 8-bit integers at 4e-3, and each layer
    // adds
    const double allowed[3] = {1e-5, 4e-2, 1e-1};
    if (!rounded_functions_are_near()) {
        std::fprintf(stderr, "a power of two or GELU is further from the truth than it says\n");
        return 1;
    }
    const auto begun = std::chrono::steady_clock::now();
    double worst[3] = {};
    long number = 0;
    uint64_t bits = 0xcbf29ce484222325;
    for (; number != cases; number++) {
        if (std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count() > seconds) break;
        Random random(seed * 1000003 + number);
        Case each(random, draw(random, 1, 3));
        each.run();
        if (each.same_everywhere) each.hash(bits);
        const double error = each.error();
        worst[each.dtype] = std::max(worst[each.dtype], error);
        if (!(error <= allowed[each.dtype])) {
            std::fprintf(stderr, "case %ld of seed %lu: error %g; %s\n", number, seed, error,
                         each.description.c_str());
            return 1;
        }
    }
    std::printf("{\"cases\": %ld, \"float32\": %g, \"bfloat16\": %g, \"int8\": %g, \"bits\": \"%lx\"}\n", number,
                worst[0], worst[1], worst[2], bits);
    return 0;
}
