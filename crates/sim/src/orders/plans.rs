//! The named explorations.

use super::Bounds;

const ONE_EACH: Bounds = Bounds::calm([1, 1]);
const TWO_EACH: Bounds = Bounds { one_by_one: true, ..Bounds::calm([2, 2]) };
const QUICK: Bounds = Bounds { slow_kernels: false, ..ONE_EACH };
const THREE: Bounds = Bounds { one_by_one: true, ..Bounds::calm([2, 1]) };

/// Explorations of `cargo xtask sim --orders`.
pub const PLANS: &[(&str, Bounds)] = &[
    ("calm", ONE_EACH),
    ("calm, cold", Bounds { warm: false, ..ONE_EACH }),
    ("calm, at the same time", Bounds { one_by_one: false, ..THREE }),
    ("calm, four", TWO_EACH),
    ("contended", Bounds { contention: true, slow_kernels: false, ..TWO_EACH }),
    ("alone", Bounds { exclusive_leases: true, ..THREE }),
    ("alone, cold", Bounds { exclusive_leases: true, warm: false, ..ONE_EACH }),
    ("pushes", Bounds { pushes: true, ..ONE_EACH }),
    ("pushes, cold", Bounds { pushes: true, warm: false, ..ONE_EACH }),
    ("pushes, three", Bounds { pushes: true, slow_kernels: false, ..THREE }),
    ("late", Bounds { late: 2, ..Bounds::calm([1, 0]) }),
    ("late, pushes", Bounds { late: 2, pushes: true, ..Bounds::calm([1, 0]) }),
    ("restart", Bounds { restarts: 1, ..ONE_EACH }),
    ("restart, cold", Bounds { restarts: 1, warm: false, ..QUICK }),
    ("restart, pushes", Bounds { restarts: 1, pushes: true, ..QUICK }),
    ("restart, three", Bounds { restarts: 1, slow_kernels: false, ..THREE }),
];

/// Explorations that run only when named: they take hours each.
pub const LONG: &[(&str, Bounds)] = &[
    ("long, restart, four", Bounds { restarts: 1, slow_kernels: false, ..TWO_EACH }),
    ("long, restart, pushes, slow", Bounds { restarts: 1, pushes: true, ..ONE_EACH }),
    ("long, late", Bounds { late: 2, ..ONE_EACH }),
];
