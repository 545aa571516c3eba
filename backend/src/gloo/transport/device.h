// Stand-in, see ../README.md.
#pragma once

namespace gloo::transport {
class Device;
}
