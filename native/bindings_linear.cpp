// Python's view of the linear layers. kernels/linear.py checks what the addresses point to.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <vector>

#include "bindings.h"

namespace nb = nanobind;

namespace octavo {
namespace {

// A description without data, for packing into later.
Matrix describe(int packing, bool stepped, bool has_minimum, std::int64_t num_outputs, std::int64_t num_inputs) {
  Matrix m{static_cast<Packing>(packing), stepped, has_minimum, num_outputs, num_inputs, nullptr};
  if (packing < 0 || packing > int(Packing::kInt5) || num_outputs < 1 || num_inputs < 1)
    throw std::invalid_argument("a matrix has a known packing and at least one output and input");
  return m;
}

}  // namespace

void bind_linear(nb::module_& m) {
  nb::class_<Matrix>(m, "Matrix", "Packed weights: what they are and where; the caller keeps the bytes alive.")
      .def_static(
          "of_type",
          [](int type_id, int dense_packing, std::int64_t num_outputs, std::int64_t num_inputs) {
            Matrix matrix = describe(dense_packing, false, false, num_outputs, num_inputs);
            if (!packing_of(type_id, matrix)) throw std::invalid_argument("no packing keeps this type without loss");
            if (row_bytes(type_id, num_inputs) == 0 || (matrix.stepped && num_inputs % 256 != 0) ||
                (type_id > 1 && type_id < 30 && num_inputs % 32 != 0))
              throw std::invalid_argument("the number of inputs is no multiple of the type's block");
            return matrix;
          },
          nb::arg("type_id"), nb::arg("dense_packing"), nb::arg("num_outputs"), nb::arg("num_inputs"))
      .def_prop_ro("packing", [](const Matrix& x) { return int(x.packing); })
      .def_ro("stepped", &Matrix::stepped)
      .def_ro("has_minimum", &Matrix::has_minimum)
      .def_ro("num_outputs", &Matrix::num_outputs)
      .def_ro("num_inputs", &Matrix::num_inputs)
      .def_prop_ro("num_bytes", [](const Matrix& x) { return matrix_bytes(x); })
      .def_prop_rw(
          "data", [](const Matrix& x) { return reinterpret_cast<std::uintptr_t>(x.data); },
          [](Matrix& x, std::uintptr_t data) { x.data = at<const char>(data); })
      .def("pack",
           [](const Matrix& x, int type_id, std::uintptr_t rows, std::uintptr_t order, int num_threads) {
             nb::gil_scoped_release release;
             pack_gguf(type_id, at<const char>(rows), at<const std::int64_t>(order), x, num_threads);
           })
      .def("unpack", [](const Matrix& x, std::uintptr_t row_ids, std::int64_t count, std::uintptr_t out) {
        nb::gil_scoped_release release;
        unpack_matrix(x, at<const std::int64_t>(row_ids), count, at<float>(out));
      });
  m.def("packed_row_bytes", &row_bytes, nb::arg("type_id"), nb::arg("num_inputs"),
        "Bytes of a row in a GGUF file; 0 for a type that no packing keeps without loss.");
  m.def("unpack_rows", [](int type_id, std::uintptr_t rows, std::uintptr_t row_ids, std::int64_t count,
                          std::int64_t num_inputs, std::uintptr_t out) {
    nb::gil_scoped_release release;
    unpack_rows(type_id, at<const char>(rows), at<const std::int64_t>(row_ids), count, num_inputs, at<float>(out));
  });
  m.def("quantise_rows",
        [](int type_id, std::uintptr_t x, std::int64_t rows, std::int64_t num_inputs, std::uintptr_t out, int num_threads) {
          nb::gil_scoped_release release;
          quantise_rows(type_id, at<const float>(x), rows, num_inputs, at<char>(out), num_threads);
        });
  m.def(
      "activation_bytes",
      [](int packing, std::int64_t rows, std::int64_t num_inputs) {
        return kernels->activation_bytes(static_cast<Packing>(packing), rows, num_inputs);
      },
      nb::arg("packing"), nb::arg("rows"), nb::arg("num_inputs"), "Bytes of prepared rows.");
  m.def(
      "multiply_rows",
      [](const std::vector<Matrix*>& weights, std::uintptr_t x, std::int64_t stride, std::int64_t rows, std::uintptr_t bias,
         std::uintptr_t out, std::int64_t out_stride, std::uintptr_t activations, int num_threads) {
        std::vector<Product> products;
        float* to = at<float>(out);
        const float* add = at<const float>(bias);
        for (const Matrix* matrix : weights) {
          products.push_back({*matrix, add, to, out_stride, 1.0f, false});
          to += matrix->num_outputs;
          if (add != nullptr) add += matrix->num_outputs;
        }
        nb::gil_scoped_release release;
        kernels->multiply_rows(products.data(), int(products.size()), at<const float>(x), stride, rows,
                               at<char>(activations), num_threads);
      },
      nb::arg("weights"), nb::arg("x"), nb::arg("stride"), nb::arg("rows"), nb::arg("bias"), nb::arg("out"),
      nb::arg("out_stride"), nb::arg("activations"), nb::arg("num_threads"),
      "Products of the same rows with one or more matrices, side by side in `out` (and in `bias`, unless 0).");
}

}  // namespace octavo
